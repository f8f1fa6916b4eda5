"""Several ranks train as one does: the same samples and losses, every case once an epoch, also on another number of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain import load_recipe
from fasttrain.data.sources.phantom import ensure_phantoms
from fasttrain.engine import trainer as trainer_module
from fasttrain.engine.following import follow
from fasttrain.engine.orders import Over
from fasttrain.engine.run import resume, train
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.together import DataParallel
from fasttrain.machine.ranks import ONLY_ONE
from fasttrain.recipe.data_spec import PhantomSource
from fasttrain.telemetry.events import StepLogged
from tests.ranks_running import in_ranks

CASES = 14
SETTINGS = {
    "data.source.cases": CASES,
    "data.split.validation": 2,
    "training.iterations_per_epoch": None,
    "data.samples_per_case": 1,
    "training.epochs": 2,
    "network": {"kind": "dynunet", "features": [4, 8, 8], "strides": [2, 2]},
}


@pytest.fixture(scope="module")
def fourteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fourteen")
    ensure_phantoms(PhantomSource(kind="phantom", cases=CASES), folder)
    return folder


class Losses:
    """Keeps what is logged, and asks for a stop after a step."""

    def __init__(self, stop: StopRequest | None = None, at: int = 0) -> None:
        self.found: list[float] = []
        self._stop, self._at = stop, at

    def on_event(self, event: Any) -> None:
        if isinstance(event, StepLogged):
            self.found.append(event.loss)
            if self._stop is not None and event.step == self._at:
                self._stop.ask("the test", 143)

    def close(self) -> None: ...


def trained(ranks: Any, values: dict, data: Path, run: Path, stop_at: int = 0, going_on: bool = False) -> Any:
    """(losses of each step, names of the cases of each step) of a rank; losses of the first alone."""
    names: list[list[str]] = []
    taken = trainer_module.Trainer._take

    def noting(self: Any, rate: float) -> Any:
        loss, batches, patches = taken(self, rate)
        names.append(list(batches.names))
        return loss, batches, patches

    trainer_module.Trainer._take = noting
    try:
        if not ranks.place.leads:
            follow(ranks, None, "cpu", StopRequest())
            return [], names
        stop = StopRequest()
        losses = Losses(stop, stop_at)
        common = {"device": "cpu", "observers": [losses], "stop": stop, "ranks": ranks}
        if going_on:
            resume(run, **common)
        else:
            train(load_recipe("demo", values), data=data, run=run, **common)
        if ranks is not ONLY_ONE:
            ranks.share(Over(0))
        return losses.found, names
    finally:
        trainer_module.Trainer._take = taken


def of_all(found: list[tuple[list, list]]) -> list[str]:
    return [name for _, steps in found for step in steps for name in step]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_is_seen_once_an_epoch(ranks: int, tiny_values: dict, fourteen: Path, tmp_path: Path) -> None:
    values = {**tiny_values, **SETTINGS, "training.batch_size": 12 // ranks // 3 or 1, "training.epochs": 1}
    found = in_ranks(ranks, trained, values, fourteen, tmp_path / "run")
    assert len(of_all(found)) == len(set(of_all(found))) == 12
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["sizes"]["ranks"] == ranks
    assert plan["sizes"]["effective_batch"] == ranks * values["training.batch_size"]


def test_the_losses_are_those_of_one_rank_with_the_whole_batch(
    tiny_values: dict, fourteen: Path, tmp_path: Path
) -> None:
    # Dice over all patches of a pass together, the default, is no mean over patches: see the next test
    loss = {"kind": "dice_ce", "batch": False}
    values = {**tiny_values, **SETTINGS, "training.batch_size": 4, "loss": loss}
    alone, names = trained(ONLY_ONE, values, fourteen, tmp_path / "alone")
    two = in_ranks(2, trained, {**values, "training.batch_size": 2}, fourteen, tmp_path / "two")
    summed = in_ranks(
        2, trained, {**values, "training.batch_size": 1, "training.accumulate": 2}, fourteen, tmp_path / "summed"
    )
    assert len(alone) == 6
    # Sums in another order, in float32
    assert two[0][0] == pytest.approx(alone, rel=1e-4)
    assert summed[0][0] == pytest.approx(alone, rel=1e-4)
    assert [sorted(step) for step in names] == [sorted(a + b) for a, b in zip(two[0][1], two[1][1], strict=True)]
    scores = [
        json.loads((tmp_path / run / "summary.json").read_text())["best"]["value"] for run in ("alone", "two", "summed")
    ]
    assert scores[1:] == pytest.approx([scores[0]] * 2, abs=1e-3)


def test_dice_over_a_batch_is_that_of_each_rank(tiny_values: dict, fourteen: Path, tmp_path: Path) -> None:
    values = {**tiny_values, **SETTINGS, "training.batch_size": 4}
    alone, _ = trained(ONLY_ONE, values, fourteen, tmp_path / "alone")
    two = in_ranks(2, trained, {**values, "training.batch_size": 2}, fourteen, tmp_path / "two")
    assert two[0][0] == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_run_goes_on_with_another_number_of_ranks(
    before: int, after: int, tiny_values: dict, fourteen: Path, tmp_path: Path
) -> None:
    values = {**tiny_values, **SETTINGS, "training.batch_size": 1 if after == 4 else 2}
    run = tmp_path / "run"

    def part(ranks: int, *more: Any) -> list:
        given = (values, fourteen, run, *more)
        return [trained(ONLY_ONE, *given)] if ranks == 1 else in_ranks(ranks, trained, *given)

    # Told after the first step; several ranks agree on it in the next one
    first = part(before, 1)
    seen = len(of_all(first))
    assert 0 < seen < 12
    rest = part(after, 0, True)
    counts = Counter(of_all(first) + of_all(rest))
    if (12 - seen) % 4 and after > 1:
        # The odd patches that end the epoch are taken by every rank alike
        assert all(one[1][0] == rest[0][1][0] for one in rest)
        for name in rest[0][1][0]:
            counts[name] -= after - 1
    assert len(counts) == 12
    assert set(counts.values()) == {2}, counts
    assert json.loads((run / "summary.json").read_text())["status"] == "done"


def test_a_resume_draws_the_dropout_of_every_rank_as_an_unbroken_run_does(
    tiny_values: dict, fourteen: Path, tmp_path: Path
) -> None:
    network = {**SETTINGS["network"], "dropout": 0.5}
    values = {**tiny_values, **SETTINGS, "network": network, "training.batch_size": 2}
    unbroken = in_ranks(2, trained, values, fourteen, tmp_path / "unbroken")[0][0]
    first = in_ranks(2, trained, values, fourteen, tmp_path / "broken", 1)[0][0]
    rest = in_ranks(2, trained, values, fourteen, tmp_path / "broken", 0, True)[0][0]
    assert 0 < len(first) < len(unbroken) == 6
    assert first + rest == unbroken


def test_ranks_draw_dropout_apart_and_each_step_anew() -> None:
    drawn = set()
    network = torch.nn.Linear(1, 1)
    for rank, step in ((1, 0), (1, 1), (2, 0), (1, 0)):
        together = DataParallel(3, 1, rank, 7)
        together.draw_from(network)
        together.before_step(step)
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 3
    torch.manual_seed(5)
    expected = float(torch.rand(()))
    torch.manual_seed(5)
    first = DataParallel(3, 1, 0, 7)
    first.draw_from(network)
    first.before_step(3)
    assert float(torch.rand(())) == expected, "the first rank's generators are those of its checkpoint"
