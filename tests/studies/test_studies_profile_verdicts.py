"""A slowed loader is called data-bound and a slowed network compute-bound, and what the right change gains was predicted.

The short form of scripts/acceptance/profile_verdicts.py: a delay in a real part, real runs of a tiny recipe.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.batches.patch_maker import PatchMaker
from fasttrain.engine.build import build, prepare_torch
from fasttrain.engine.preparing import prepare
from fasttrain.engine.stop import StopRequest
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.profiling import three_runs as pace
from fasttrain.studies.profiling.profile import Profile, profile
from fasttrain.studies.profiling.three_runs import OneStream, Stretches, three_runs

OPEN = {"acceleration.amp": "off", "acceleration.channels_last": "off", "data.workers": 0, "training.ema": None}
WITHIN = 0.2
TRIES = 3
"""Of a prediction and what is then measured: other work on the same CPUs between the two makes them differ."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer rounds than the command makes: the delay is far above what else changes from one to the next. Threads that wait for
    each other where others use the CPUs would be more of a delay than the one that is put in.
    """
    monkeypatch.setattr(pace, "_ROUNDS", 3)
    monkeypatch.setattr("fasttrain.engine.preparing.limit_threads", lambda count: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seen(recipe: ResolvedRecipe, data: Path, folder: Path) -> Profile:
    return profile(recipe.recipe, data, "cpu", folder, lambda event: None, StopRequest())


def rate(recipe: ResolvedRecipe, data: Path) -> float:
    """Patches/s with real data."""
    prepared = prepare(recipe.recipe, data, "cpu")
    plan = prepared.plan
    prepare_torch(plan, prepared.hardware)
    assembly = build(recipe.recipe, plan, prepared.hardware, prepared.split, lambda *_: None, lambda *_: None)
    try:
        stream = OneStream(assembly.trainer.source)
        assembly.trainer.source = stream
        found = three_runs(Stretches(assembly.trainer, stream, torch.device("cpu"), plan.workers, plan.prefetch_factor))
        return plan.sizes.effective_batch / found.real.seconds
    finally:
        assembly.close()


def compared(
    recipe: ResolvedRecipe, changed: Callable[[str], ResolvedRecipe], bound: str, data: Path, folder: Path
) -> None:
    """The verdict, and the gain of the first change beside the one that is measured with it."""
    for number in range(TRIES):
        before = seen(recipe, data, folder / str(number))
        assert before.verdict.bound == bound, before.verdict
        assert before.changes, "nothing was predicted"
        predicted = before.changes[0]
        measured = rate(changed(predicted.setting), data) / before.patches_per_second - 1
        if number == TRIES - 1 or predicted.gain == pytest.approx(measured, rel=WITHIN):
            assert predicted.gain == pytest.approx(measured, rel=WITHIN)
            return


def test_a_slowed_loader_is_data_bound(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., ResolvedRecipe], phantoms: Path, tmp_path: Path
) -> None:
    made = PatchMaker._made

    def slow_made(self: PatchMaker, first_position: int) -> Any:
        time.sleep(0.3)
        return made(self, first_position)

    monkeypatch.setattr(PatchMaker, "_made", slow_made)

    def changed(setting: str) -> ResolvedRecipe:
        assert setting.startswith("data.workers: ")
        return tiny(**{**OPEN, "data.workers": int(setting.removeprefix("data.workers: "))})

    compared(tiny(**OPEN), changed, "data-bound", phantoms, tmp_path)


def test_a_slowed_network_is_compute_bound(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., ResolvedRecipe], phantoms: Path, tmp_path: Path
) -> None:
    forward = torch.nn.Conv3d.forward

    def slow_forward(self: torch.nn.Conv3d, image: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return forward(self, image)

    monkeypatch.setattr(torch.nn.Conv3d, "forward", slow_forward)
    again = "acceleration.activation_checkpointing"
    # A validation of that network takes long as well, and is no matter here
    settings = {**OPEN, again: "on", "validation.every": 1000, "training.epochs": 1000}

    def changed(setting: str) -> ResolvedRecipe:
        assert setting == f"{again}: off"
        return tiny(**{**settings, again: "off"})

    compared(tiny(**settings), changed, "compute-bound", phantoms, tmp_path)


def test_without_a_delay_it_is_not_the_data(
    tiny: Callable[..., ResolvedRecipe], phantoms: Path, tmp_path: Path
) -> None:
    found = seen(tiny(**{**OPEN, "validation.every": 1000, "training.epochs": 1000}), phantoms, tmp_path)
    assert found.verdict.bound in ("compute-bound", "bandwidth-bound")
