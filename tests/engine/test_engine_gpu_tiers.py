"""Volumes in two tiers, from a run's plan to its losses: what is learnt does not depend on where a case lies."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.batches import ResidentSource
from fasttrain.engine.build import Assembly, build
from fasttrain.engine.planning import choices, gpu_memory, memory_plan, plan, trial
from fasttrain.engine.preparing import prepare
from fasttrain.engine.step import Step
from fasttrain.errors import DataError
from fasttrain.machine.hardware import GIB, Hardware

H100 = Hardware("cuda:0", "H100", 16, 64.0, "GPU-1", 80.0, (9, 0), 91900)
PLAIN = {"augment": {}, "network__dropout": 0.0, "training__epochs": 1}


@pytest.fixture
def built(tiny, phantoms: Path) -> Callable[..., tuple[Assembly, list[tuple[str, str]]]]:
    """The parts of a run whose training volumes lie where a GPU's would, here in the CPU's memory."""

    def assembled(resident_share: float, **more: object) -> tuple[Assembly, list[tuple[str, str]]]:
        recipe = tiny(**{**PLAIN, **more}).recipe
        prepared = prepare(recipe, phantoms, "cpu")
        resident = int(prepared.plan.sizes.training_bytes * resident_share)
        told: list[tuple[str, str]] = []
        progress: list[str] = []
        assembly = build(
            recipe,
            replace(prepared.plan, cache="gpu", resident_bytes=resident, fill_threads=2),
            prepared.hardware,
            prepared.split,
            lambda what, done, total: progress.append(f"{what} {done}/{total}"),
            lambda text, level: told.append((text, level)),
        )
        assert "reading training cases to the GPU 4/4" in progress
        assert "reading validation cases 2/2" in progress
        return assembly, told

    return assembled


def losses_of(assembly: Assembly) -> list[float]:
    found = [float(report.loss) for report in islice(assembly.trainer.steps(), 5)]
    assembly.close()
    return found


def test_a_run_learns_the_same_from_both_tiers_as_from_memory(built, tiny, phantoms: Path, tmp_path: Path) -> None:
    train(tiny(**PLAIN), data=phantoms, run=tmp_path / "run", device="cpu")
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    expected = [one["loss"] for one in map(json.loads, lines) if one["event"] == "StepLogged"]
    for share, shown in ((1.0, "4 cases, "), (0.5, "2 of 4 cases ("), (0.0, "0 of 4 cases (")):
        assembly, told = built(share)
        assert isinstance(assembly.trainer.source, ResidentSource)
        (line,) = [text for text, _ in told if text.startswith("gpu cache:")]
        assert line.startswith(f"gpu cache: {shown}")
        assert losses_of(assembly) == pytest.approx(expected, rel=1e-6)


def test_faulty_cases_of_both_parts_are_told_at_once(built, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasttrain.data.preprocess import Preprocess

    def cut_short(self: Preprocess, case: object) -> None:
        raise DataError(f"{case.name} is cut short")  # type: ignore[attr-defined]

    monkeypatch.setattr(Preprocess, "__call__", cut_short)
    with pytest.raises(DataError) as caught:
        built(1.0)
    assert len(caught.value.faults) == 6


def test_a_step_that_cannot_be_recorded_for_want_of_memory_runs_without_a_graph_and_says_so(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(acceleration__channels_last="on", acceleration__amp="bf16").recipe
    monkeypatch.setattr(choices, "missing_for_compile", lambda: None)
    without = trial.Candidate("bf16", True, True, False)
    tried: list[trial.Candidate] = []

    def measured(recipe, hardware, candidates, checkpointing, told, held):
        tried.extend(candidates)
        held[without] = GIB
        return {without: 0.1}

    monkeypatch.setattr(choices, "measure", measured)
    choice = choices.choose_step(recipe, H100, None)
    assert tried == [replace(without, captured=True)]
    assert (choice.candidate, choice.checkpointing, choice.held_bytes) == (without, False, GIB)
    assert choice.reasons["cuda_graphs"].startswith("a step could not be recorded when it was measured")


def test_the_plan_of_a_measured_step_leaves_it_its_memory(
    tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the measurement to the bytes that the run takes for volumes, which plan.json keeps for a resume."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(choices, "missing_for_compile", lambda: None)

    def measured(recipe, hardware, candidates, checkpointing, told, held):
        held[candidates[0]] = 40 * GIB
        return {candidates[0]: 0.1}

    monkeypatch.setattr(choices, "measure", measured)
    recipe = tiny(
        acceleration__amp="bf16", acceleration__channels_last="on", data__workers="auto", data__cache__kind="auto"
    ).recipe
    sizes = plan.Sizes(300, 2, 0, 1, 2, 1, 2, 5, 4, 20, 61 * GIB, GIB, 0, 60 * GIB)
    made = plan.make_plan(recipe, H100, sizes)
    assert made.cache == "gpu"
    assert made.resident_bytes == gpu_memory.volume_room(recipe, H100, sizes, 40 * GIB) < 30 * GIB
    assert (made.record()["step_bytes"], made.record()["resident_bytes"]) == (40 * GIB, made.resident_bytes)
    need = memory_plan.memory_need(recipe, H100, sizes, "gpu", resident=made.resident_bytes)
    assert need.volumes == 61 * GIB - made.resident_bytes
    again = plan.make_plan(recipe, H100, sizes, made.record(), "H100")
    assert again.resident_bytes == made.resident_bytes


FOUR = replace(H100, ranks=4, local_ranks=4, cards_reach=True)


def test_several_cards_hold_a_copy_each_or_a_part_each(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "missing_for_compile", lambda: None)
    monkeypatch.setattr(memory_plan, "missing_for_kernels", lambda _: None)

    def decided(training_gib: int, hardware: Hardware = FOUR, shard: str = "auto") -> tuple[int, str, int, str]:
        recipe = tiny(data__workers="auto", data__cache={"kind": "gpu", "shard": shard}).recipe
        sizes = plan.Sizes(300, 2, 0, 1, 2, 1, 2, 5, 4, 20, training_gib * GIB, 0, 2 * GIB, training_gib * GIB)
        cards, why = gpu_memory.cards_together(recipe, hardware, sizes, 20 * GIB)
        resident = gpu_memory.resident_bytes(recipe, hardware, sizes, 20 * GIB)
        on_gpus = gpu_memory.on_gpus_bytes(recipe, hardware, sizes, 20 * GIB)
        need = memory_plan.memory_need(recipe, hardware, sizes, "gpu", on_gpus)
        assert need.volumes == training_gib * GIB - on_gpus
        return cards, why, round(resident / GIB), memory_plan.choose_cache(recipe, hardware, sizes, None, 20 * GIB)[1]

    # Beside a step of 20 GiB a card has room for 54
    cards, why, resident, told = decided(40)
    assert (cards, why, resident) == (1, "each of 4 GPUs has room for all 40.0 GiB, and its own memory is nearest", 40)
    assert "about 40.0 GiB of the 80 GiB of each H100; patches are cut there" in told
    cards, why, resident, told = decided(160)
    assert (cards, resident) == (4, 42), "a part, and room for one case more"
    assert why == "one GPU has room for 54.0 GiB of 160.0 GiB; 4 hold a part each and read each other's memory"
    assert "about 160.0 GiB of the 4 × 80 GiB of H100; patches are cut there" in told
    cards, why, resident, told = decided(240)
    assert (cards, resident) == (4, 54)
    assert "269 of 300 cases (216.0 GiB) on 4 GPUs together, the rest from pinned memory" in told
    cards, why, resident, told = decided(160, replace(FOUR, cards_reach=False, memory_free_gib=512.0))
    assert (cards, why, resident) == (1, "the 4 GPUs cannot read each other's memory", 54)
    assert "101 of 300 cases (54.0 GiB) on each GPU, the rest from pinned memory" in told
    assert decided(40, shard="on")[:3] == (4, "set in the recipe; 4 GPUs read each other's memory", 12)
    assert decided(160, replace(FOUR, memory_free_gib=512.0), "off")[:3] == (1, "set in the recipe", 54)
    apart = decided(40, replace(FOUR, cards_reach=False), "on")
    assert apart[:2] == (1, "asked for, but the 4 GPUs cannot read each other's memory")
    assert decided(160, replace(H100, memory_free_gib=512.0), "on")[:3] == (1, "one rank", 54)


def test_what_goes_wrong_with_a_later_step_is_told_once(tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    """Recording fails at the fourth step, long after the first one's warnings were told."""
    original, taken = Step.__call__, []

    def call(self: Step, *arguments: object) -> torch.Tensor:
        taken.append(1)
        if len(taken) == 4:
            self.warning = "the step could not be recorded as a CUDA graph, so it runs without: CUDA out of memory"
        return original(self, *arguments)

    monkeypatch.setattr(Step, "__call__", call)
    run = train(tiny(training__epochs=2), data=phantoms, run=tmp_path / "run", device="cpu").run
    assert (run / "events.jsonl").read_text().count("could not be recorded as a CUDA graph") == 1


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "StepLogged"]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_a_gpu_learns_the_same_from_both_tiers_in_a_cuda_graph(
    share: float, tiny, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**PLAIN, "data__workers": "auto", "acceleration__tf32": "off", "acceleration__cuda_graphs": "on"}
    expected = losses(train(tiny(**settings), data=phantoms, run=tmp_path / "memory", device="cuda").run)
    room = lambda recipe, hardware, sizes, step: int(share * sizes.training_bytes)  # noqa: E731
    monkeypatch.setattr(gpu_memory, "volume_room", room)
    run = train(tiny(**settings, data__cache__kind="gpu"), data=phantoms, run=tmp_path / "gpu", device="cuda").run
    made = json.loads((run / "plan.json").read_text())
    assert (made["cache"], made["cuda_graphs"]) == ("gpu", True)
    text = (run / "events.jsonl").read_text()
    assert "could not be recorded" not in text
    assert ("the rest from pinned memory" in text) == (share < 1)
    assert losses(run) == pytest.approx(expected, rel=2e-3)


@pytest.mark.gpu
def test_memory_that_is_taken_while_the_cache_fills_makes_two_tiers(
    tiny, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan believes in far more room than there is."""
    monkeypatch.setattr(gpu_memory, "volume_room", lambda *_: 1 << 50)
    monkeypatch.setattr(gpu_memory, "resident_bytes", lambda *_: 1 << 50)
    monkeypatch.setattr(plan, "resident_bytes", lambda *_: 1 << 50)
    run = train(
        tiny(training__epochs=1, data__cache__kind="gpu", data__workers="auto"),
        data=phantoms,
        run=tmp_path / "run",
        device="cuda",
    ).run
    text = (run / "events.jsonl").read_text()
    assert "the GPU had no room for" in text
    assert torch.cuda.memory_allocated() < 1 << 30
