"""Checkpoints beside the training: timed, of finished steps, kept by rule, with room asked for, and on disks that refuse them."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fasttrain.checkpoints import read_checkpoint, write_checkpoint
from fasttrain.engine import checkpoint_space, saving
from fasttrain.engine.checkpoint_space import check_space, expected_checkpoint_bytes
from fasttrain.engine.optimisation.ema import Ema
from fasttrain.engine.optimisation.optim import build_optimizer
from fasttrain.engine.outline import outline_of
from fasttrain.engine.run import RunResult, resume, train
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.trainer import Trainer
from fasttrain.errors import DivergedError, StorageError
from fasttrain.networks import build_network
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import CheckpointSaved, Event, Message, Progress, StepLogged


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}


class Heard:
    """Keeps all events, and does something at one of them."""

    def __init__(
        self, at: Callable[[Event], bool] = lambda event: False, act: Callable[[], None] = lambda: None
    ) -> None:
        self.events: list[Event] = []
        self.at, self.act = at, act

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if self.at(event):
            self.act()

    def close(self) -> None: ...

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Message) and event.level == "warning"]

    def saved(self, name: str) -> list[CheckpointSaved]:
        return [event for event in self.events if isinstance(event, CheckpointSaved) and event.path.endswith(name)]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How many writes succeed (`free`), and how long each takes (`seconds`)."""
    state = {"free": 10**9, "seconds": 0.0}

    def write(path: Path, given: dict) -> int:
        time.sleep(state["seconds"])
        if state["free"] <= 0:
            raise StorageError(f"{path} cannot be written: too little room; 9 bytes are needed, 8 are free")
        state["free"] -= 1
        return write_checkpoint(path, given)

    monkeypatch.setattr(saving, "write_checkpoint", write)
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.0)
    return state


def test_time_passes_between_timed_checkpoints(tiny, phantoms: Path, tmp_path: Path) -> None:
    heard = Heard()
    recipe = tiny(output__checkpoint_every="0.1s", training__epochs=1, training__iterations_per_epoch=20)
    train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    saved = [(event.epoch, event.step) for event in heard.saved("last.pt")]
    assert len(saved) >= 3
    assert saved[-1] == (1, 20)
    assert all(one < other for one, other in itertools.pairwise(saved))
    assert len(saved) < 20, "a checkpoint after each step is not one every tenth of a second"


def test_the_training_goes_on_while_a_checkpoint_is_written(tiny, phantoms: Path, tmp_path: Path, disk) -> None:
    """A write takes as long as many steps; each checkpoint still holds a finished step, and a resume of it ends the same."""
    disk["seconds"] = 0.3
    whole = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "whole", device="cpu").run
    kept = tmp_path / "kept.pt"
    run = tmp_path / "run"
    first = lambda event: isinstance(event, CheckpointSaved) and event.path.endswith("last.pt") and not kept.exists()  # noqa: E731
    heard = Heard(first, lambda: kept.write_bytes((run / "checkpoints/last.pt").read_bytes()))
    recipe = tiny(training__epochs=1, output__checkpoint_every="0.01s")
    train(recipe, data=phantoms, run=run, device="cpu", observers=[heard])
    event = heard.saved("last.pt")[0]
    before = [one.step for one in heard.events[: heard.events.index(event)] if isinstance(one, StepLogged)]
    assert max(before) > event.step, "no step was taken while it was written"
    assert event.pause_seconds < event.seconds
    assert read_checkpoint(kept)["progress"]["step"] == event.step
    for path in (run / "checkpoints").glob("*.pt"):
        path.unlink()
    (run / "summary.json").unlink()
    kept.rename(run / "checkpoints/last.pt")
    resume(run)
    assert losses(run) == losses(whole)


def test_where_steps_are_counted_every_one_is_saved(tiny, phantoms: Path, tmp_path: Path, disk) -> None:
    disk["seconds"] = 0.05
    heard = Heard()
    recipe = tiny(training__epochs=1, output__checkpoint_every="1 step")
    train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    # The end of the epoch is a state of its own: the fifth step with its validation
    assert [(event.epoch, event.step) for event in heard.saved("last.pt")] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5)]


def test_a_full_disk_keeps_the_former_checkpoint_and_is_tried_again(tiny, phantoms: Path, tmp_path: Path, disk) -> None:
    run = tmp_path / "run"
    held: list[int] = []

    def fill() -> None:
        disk["free"] = 0

    def free() -> None:
        held.append(read_checkpoint(run / "checkpoints/last.pt")["progress"]["step"])
        disk["free"] = 10**9

    heard = Heard(lambda event: isinstance(event, CheckpointSaved) and event.step == 2, fill)
    later = Heard(lambda event: isinstance(event, StepLogged) and event.step == 9, free)
    recipe = tiny(training__epochs=3, output__checkpoint_every="2 steps")
    result = train(recipe, data=phantoms, run=run, device="cpu", observers=[heard, later])
    assert (result.exit_code, held) == (0, [2])
    refused = [text for text in heard.warnings if "too little room" in text]
    assert any(
        "last.pt cannot be written" in text and "the former last.pt stands, training goes on" in text
        for text in refused
    )
    # What was the best is kept in memory until it can be written
    assert any("best.pt cannot be written" in text and "there is no best.pt yet" in text for text in refused)
    best = read_checkpoint(run / "checkpoints/best.pt")["progress"]
    assert best["best_epoch"] == best["epoch"] == result.summary["best"]["epoch"]
    assert read_checkpoint(run / "checkpoints/last.pt")["progress"]["step"] == 15
    said = [event.text for event in heard.events if isinstance(event, Message)]
    assert any("last.pt could be written again" in text for text in said)


def test_a_disk_that_stays_full_ends_with_6(tiny, phantoms: Path, tmp_path: Path, disk) -> None:
    run, heard = tmp_path / "run", Heard()
    disk["free"] = 2
    recipe = tiny(training__epochs=2, output__checkpoint_every="2 steps")
    with pytest.raises(StorageError, match="last.pt cannot be written: too little room"):
        train(recipe, data=phantoms, run=run, device="cpu", observers=[heard])
    assert [event.step for event in heard.events if isinstance(event, StepLogged)] == list(range(1, 11)), "it trains on"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 6, 10)
    assert read_checkpoint(run / "checkpoints/last.pt")["progress"]["step"] == 4
    disk["free"] = 10**9
    assert resume(run).exit_code == 0


def test_told_to_stop_where_nothing_can_be_saved_ends_with_6(tiny, phantoms: Path, tmp_path: Path, disk) -> None:
    stop = StopRequest()
    disk["free"] = 0
    at = Heard(lambda event: isinstance(event, StepLogged) and event.step == 3, lambda: stop.ask("SIGTERM", 143))
    with pytest.raises(StorageError, match="last.pt cannot be written"):
        train(tiny(), data=phantoms, run=tmp_path / "run", device="cpu", observers=[at], stop=stop)


def test_a_validation_is_not_begun_with_steps_that_time_would_have_saved(
    tiny, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interval that ends in the validation and not before: however busy the machine is, no state is still being written
    due = saving.Saver.due_before_validation
    monkeypatch.setattr(saving.Saver, "due_before_validation", lambda saver, seconds: due(saver, 3600.0))
    run, held = tmp_path / "run", []
    validating = lambda event: isinstance(event, Progress) and event.what == "validating" and event.done == event.total  # noqa: E731
    last = run / "checkpoints/last.pt"

    def kept() -> None:
        # The thread that writes may be late; what was not asked for before does not come while this one waits
        give_up = time.monotonic() + 20
        while not last.exists() and time.monotonic() < give_up:
            time.sleep(0.02)
        held.append(last.exists() and read_checkpoint(last)["progress"]["step"])

    heard = Heard(validating, kept)
    recipe = tiny(training__epochs=1, output__checkpoint_every="1 hour")
    train(recipe, data=phantoms, run=run, device="cpu", observers=[heard])
    assert held == [5]


def test_a_run_at_rest_is_saved_from_beside(tiny, phantoms: Path, tmp_path: Path) -> None:
    """As the thread that answers signals does it while a validation takes long: the checkpoint is that of the finished epoch."""
    run, ended = tmp_path / "run", []
    stop = StopRequest()

    def end() -> None:
        stop.end_at_rest(lambda: ended.append((run / "checkpoints/last.pt").read_bytes()))

    validating = Heard(
        lambda event: isinstance(event, Progress) and event.what == "validating" and event.done == 1, end
    )
    recipe = tiny(training__epochs=2, training__ema={"decay": 0.9})
    whole = train(recipe, data=phantoms, run=run, device="cpu", observers=[validating], stop=stop).run
    assert len(ended) == 2
    before = losses(whole)
    for path in (run / "checkpoints").glob("*.pt"):
        path.unlink()
    (run / "summary.json").unlink()
    (run / "checkpoints/last.pt").write_bytes(ended[0])
    progress = read_checkpoint(run / "checkpoints/last.pt")["progress"]
    assert (progress["step"], progress["step_in_epoch"], progress["epoch"]) == (5, 5, 0)
    resume(run)
    assert losses(whole) == before


@pytest.mark.parametrize("ema", [None, {"decay": 0.9}])
@pytest.mark.parametrize(
    "optimizer",
    [{"kind": "sgd", "momentum": 0.9}, {"kind": "sgd", "momentum": 0.0, "nesterov": False}, {"kind": "adam"},
     {"kind": "adamw"}, {"kind": "novograd"}, {"kind": "muon"}],
    ids=lambda spec: "-".join(map(str, spec.values())),
)  # fmt: skip
def test_the_room_that_is_asked_for_is_what_a_checkpoint_takes(
    optimizer: dict, ema: dict | None, tiny, tmp_path: Path
) -> None:
    recipe = tiny(
        optimizer={"learning_rate": 1e-3, **optimizer},
        training__ema=ema,
        network={"kind": "dynunet", "features": [16, 48, 96], "strides": [2, 2]},
    ).recipe
    network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    average = Ema(network, 0.9) if ema else None
    built = build_optimizer(recipe.optimizer, network.parameters(), fused=False)
    step = Step(network, torch.nn.Identity(), built, Precision("cpu", None, None), 1, ema=average)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    size = write_checkpoint(tmp_path / "last.pt", TrainState(step).capture())
    expected = expected_checkpoint_bytes(recipe, outline_of(recipe).parameters)
    assert size <= expected <= 1.6 * size + 600_000


def room_needed(folder: Path, recipe, monkeypatch: pytest.MonkeyPatch, free: int = 1000) -> str:
    monkeypatch.setattr(checkpoint_space, "free_bytes", lambda folder, reserved: free)
    with pytest.raises(StorageError) as caught:
        check_space(RunFolder(folder), recipe, 1_000_000)
    return str(caught.value)


def test_room_is_asked_for_by_what_is_kept(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = expected_checkpoint_bytes(tiny().recipe, 1_000_000)
    plain = room_needed(tmp_path / "run", tiny().recipe, monkeypatch)
    assert (
        f"need {3 * each + (1 << 20):,} bytes (last, best and the one being written, about {each:,} bytes each)"
        in plain
    )
    assert "its disk has 1,000 free" in plain
    assert str(tmp_path / "run/checkpoints") in plain
    kept = room_needed(tmp_path / "run", tiny(output__keep_every=1, output__keep=3).recipe, monkeypatch)
    assert f"need {6 * each + (1 << 20):,} bytes (last, best, 3 by output.keep" in kept
    # No more epochs than there are can be kept: 4, of which every second one
    fewer = room_needed(tmp_path / "run", tiny(output__keep_every=2, output__keep=9).recipe, monkeypatch)
    assert f"need {5 * each + (1 << 20):,} bytes" in fewer
    # What is there already is not asked for again
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/last.pt").write_bytes(bytes(each))
    assert f"need {2 * each + (1 << 20):,} bytes" in room_needed(tmp_path / "run", tiny().recipe, monkeypatch)
    monkeypatch.setattr(checkpoint_space, "free_bytes", lambda folder, reserved: 2 * each + (1 << 20))
    check_space(RunFolder(tmp_path / "run"), tiny().recipe, 1_000_000)
    # A disk that does not say how much it has is given the benefit of the doubt
    monkeypatch.setattr(checkpoint_space, "free_bytes", lambda folder, reserved: None)
    check_space(RunFolder(tmp_path / "other"), tiny().recipe, 1_000_000)


def test_folds_that_are_to_come_count(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folds.json").write_text(json.dumps({"format": 1, "folds": 5, "device": "cpu"}))
    each = expected_checkpoint_bytes(tiny().recipe, 1_000_000)
    told = room_needed(tmp_path / "fold_1", tiny().recipe, monkeypatch)
    assert (
        f"need {(2 * 4 + 1) * each + (1 << 20):,} bytes (last, best and the one being written of each of 4 folds"
        in told
    )


def test_a_run_without_room_trains_nothing_and_leaves_nothing(
    tiny, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_space, "free_bytes", lambda folder, reserved: 1000)
    with pytest.raises(StorageError, match="checkpoints of this run need"):
        train(tiny(), data=phantoms, run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_diverged_run_names_cases_scale_and_what_stands(tiny, phantoms: Path, tmp_path: Path) -> None:
    def told(**more) -> str:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        recipe = tiny(training__epochs=12, schedule={"kind": "constant"}, **more)
        with pytest.raises(DivergedError) as caught:
            train(recipe, data=phantoms, run=folder, device="cpu")
        return str(caught.value)

    plain = told(optimizer={"kind": "sgd", "learning_rate": 1e30})
    assert "their batches held phantom_00" in plain
    assert "losses are not scaled" in plain
    assert "acceleration.amp" not in plain, "it is off already"
    assert "lower optimizer.learning_rate" in plain
    assert "last.pt of step" in plain
    assert "stands, and its weights are finite" in plain


def test_where_no_checkpoint_is_sound_the_run_is_left_as_it_is(whole_run: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run.run, run)
    (run / "summary.json").unlink()
    (run / "checkpoints/.last.pt.1.part").write_bytes(b"half")
    files = sorted((run / "checkpoints").glob("*.pt"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-100])
    before = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in run.rglob("*")}
    with pytest.raises(StorageError) as caught:
        resume(run)
    assert len(caught.value.faults) == len(files)
    assert {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in run.rglob("*")} == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_weight_that_is_not_finite_is_found_on_a_gpu(value: float) -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 40, 3), torch.nn.BatchNorm3d(40), torch.nn.Conv3d(40, 40, 3)
    ).cuda()
    step = Step(network, torch.nn.Identity(), torch.optim.SGD(network.parameters()), Precision("cuda", None, None), 1)
    assert TrainState(step).finite()
    with torch.no_grad():
        network[2].weight.view(-1)[777] = value
    assert bool(TrainState(step).finite()) == (value == 3e38)


def test_under_loss_scaling_the_scale_is_named_and_cases_are_counted() -> None:
    network = torch.nn.Conv3d(1, 2, 3)
    step = Step(
        network, torch.nn.Identity(), torch.optim.SGD(network.parameters()), Precision("cpu", torch.float16, None), 1
    )
    trainer = Trainer(TrainState(step), source=None, rate=lambda step: 1.0, steps_per_epoch=5)  # type: ignore[arg-type]
    names = [["early"], *([f"case_{number:02d}", "twice"] for number in range(12))]
    trainer._names.extend(names)
    told = trainer._bad_batches(12)
    assert told.startswith("their batches held twice 12×, case_00, ")
    assert told.endswith(" and 5 more; the loss scale is 6.55e+04")
    assert "early" not in told
