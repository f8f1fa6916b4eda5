"""A run goes on from the checkpoint that got furthest, keeps its best, and knows its cases' scores, however it was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fasttrain.checkpoints import furthest_good, read_checkpoint, write_checkpoint
from fasttrain.engine.folds import resume_folds, train_folds
from fasttrain.engine.limits import Limits
from fasttrain.engine.run import RunResult, resume, train
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import StorageError
from fasttrain.telemetry.events import CheckpointSaved, Event, Message, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics


class Heard:
    """Keeps the messages, and asks for a stop at an event."""

    def __init__(self, at=lambda event: False) -> None:
        self.at, self.stop, self.told, self.warned, self.steps = at, StopRequest(), [], [], []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self.told.append(event.text)
            if event.level == "warning":
                self.warned.append(event.text)
        if isinstance(event, StepLogged):
            self.steps.append(event.step)
        if self.at(event):
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


def went_on(run: Path, *assignments: str, **more) -> Heard:
    heard = Heard()
    resume(run, observers=[heard], assignments=assignments, **more)
    return heard


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}


def stopped(recipe, data: Path, run: Path, step: int) -> Path:
    heard = Heard(lambda event: getattr(event, "step", 0) == step)
    train(recipe, data=data, run=run, device="cpu", observers=[heard], stop=heard.stop)
    return run


@pytest.fixture(scope="module")
def interrupted(tiny, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped within the fourth epoch, with a checkpoint of each epoch."""
    return stopped(tiny(output__keep_every=1, output__keep=9), phantoms, tmp_path_factory.mktemp("runs") / "run", 17)


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def place(path: Path) -> tuple[int, int]:
    progress = read_checkpoint(path)["progress"]
    return progress["epoch"], progress["step"]


@pytest.mark.parametrize("newest", ["best.pt", "epoch_0003.pt"])
def test_a_newer_checkpoint_than_the_last_is_gone_on_from(newest: str, run: Path, whole_run: RunResult) -> None:
    """As a kill between two renames leaves them, or an interval that is longer than an epoch."""
    folder = run / "checkpoints"
    third = (folder / "epoch_0003.pt").read_bytes()
    shutil.copy(folder / "epoch_0002.pt", folder / "last.pt")
    (folder / "epoch_0003.pt").unlink()
    if newest == "best.pt":
        state = read_checkpoint_bytes(third, folder)
        state["progress"] |= {"best_value": 0.9, "best_epoch": 3}
        write_checkpoint(folder / "best.pt", state)
    else:
        shutil.copy(folder / "epoch_0001.pt", folder / "best.pt")
        (folder / newest).write_bytes(third)
    heard = went_on(run, *([] if newest != "best.pt" else ["optimizer.learning_rate=1e-9"]))
    assert any(f"restored from {newest} (3 epochs done, 15 steps" in text for text in heard.told)
    assert not any("missing" in text or "damaged" in text for text in heard.warned)
    assert heard.steps == [16, 17, 18, 19, 20]
    if newest == "best.pt":
        assert json.loads((run / "summary.json").read_text())["best"]["value"] == 0.9
        assert read_checkpoint(folder / "best.pt")["progress"]["best_epoch"] == 3
    else:
        assert losses(run) == losses(whole_run.run)
        assert [row["train_loss"] for row in read_metrics(run / "metrics.csv")] == [
            row["train_loss"] for row in read_metrics(whole_run.run / "metrics.csv")
        ]


def read_checkpoint_bytes(content: bytes, folder: Path) -> dict:
    (folder / "spare.pt").write_bytes(content)
    state = read_checkpoint(folder / "spare.pt")
    (folder / "spare.pt").unlink()
    return state


def test_the_last_one_stands_where_it_is_the_furthest(run: Path, whole_run: RunResult) -> None:
    heard = went_on(run)
    assert heard.warned == []
    assert any("restored from last.pt (3 epochs done, 17 steps" in text for text in heard.told)
    assert losses(run) == losses(whole_run.run)


def test_of_two_of_one_step_the_closed_epoch_is_further(tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    write_checkpoint(last, {"progress": {"step": 10, "epoch": 1}, "w": torch.ones(3)})
    write_checkpoint(best, {"progress": {"step": 10, "epoch": 2}, "w": torch.ones(3)})
    assert furthest_good(last, [best]).path == best
    shutil.copy(best, last)
    assert furthest_good(last, [best]).path == last
    # One that says nothing of itself is the last to be taken
    write_checkpoint(best, {"w": torch.ones(3)})
    assert furthest_good(last, [best]).path == last
    last.write_bytes(last.read_bytes()[:700])
    found = furthest_good(last, [best])
    assert (found.path, len(found.damaged)) == (best, 1)
    best.unlink()
    with pytest.raises(StorageError, match="last.pt is damaged"):
        furthest_good(last, [best])


def spoil(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        content = bytearray(path.read_bytes())
        weights = torch.load(path, weights_only=True)["network"]
        first = next(iter(weights.values())).contiguous().numpy().tobytes()
        content[content.index(first)] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["gone", "emptied", "a bit flipped"])
@pytest.mark.parametrize("periodic", [True, False])
def test_a_best_that_is_lost_is_told_and_written_anew(
    how: str, periodic: bool, run: Path, whole_run: RunResult
) -> None:
    folder = run / "checkpoints"
    best_epoch = read_checkpoint(folder / "last.pt")["progress"]["best_epoch"]
    spoil(folder / "best.pt", how)
    if not periodic:
        for path in folder.glob("epoch_*.pt"):
            path.unlink()
    heard = went_on(run)
    said = " ".join(heard.warned)
    if how != "gone":
        assert "best.pt is damaged" in said
    assert ("best.pt is written anew" in said) == periodic
    assert ("is lost: the next validation begins best.pt anew" in said) == (not periodic)
    progress, summary = read_checkpoint(folder / "best.pt")["progress"], json.loads((run / "summary.json").read_text())
    assert progress["best_epoch"] == summary["best"]["epoch"]
    assert progress["best_value"] == summary["best"]["value"]
    assert summary["best"]["epoch"] in ((best_epoch, 4) if periodic else (4,))
    assert losses(run) == losses(whole_run.run)


def test_a_best_that_was_never_written_does_not_count(run: Path) -> None:
    """The disk was full just then, and the kill came before it was tried again."""
    folder = run / "checkpoints"
    state = read_checkpoint(folder / "last.pt")
    state["progress"] |= {"best_value": 0.99, "best_epoch": 2}
    write_checkpoint(folder / "last.pt", state)
    first = read_checkpoint(folder / "epoch_0001.pt")["progress"]
    shutil.copy(folder / "epoch_0001.pt", folder / "best.pt")
    (folder / "epoch_0002.pt").write_bytes(b"")
    heard = went_on(run)
    assert any("was never written: best.pt holds" in text and "of epoch 1" in text for text in heard.warned)
    assert json.loads((run / "summary.json").read_text())["best"]["value"] >= first["best_value"]


def test_checkpoints_that_are_removed_under_a_run_come_back(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def remove(event: Event) -> bool:
        if isinstance(event, CheckpointSaved) and event.epoch == 2 and event.path.endswith("last.pt"):
            shutil.rmtree(run / "checkpoints")
        return False

    heard = Heard(remove)
    result = train(tiny(), data=phantoms, run=run, device="cpu", observers=[heard])
    assert result.exit_code == 0
    assert any("best.pt is gone" in text for text in heard.warned)
    assert place(run / "checkpoints/last.pt") == (4, 20)
    progress = read_checkpoint(run / "checkpoints/best.pt")["progress"]
    assert progress["best_epoch"] == result.summary["best"]["epoch"] >= 3


KILLED_BEFORE_ITS_SUMMARY = """
import os, signal, sys
from fasttrain.engine import {module}
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
from fasttrain.engine import ending
ending.write_summary = killed
from fasttrain.engine.run import resume, train
from fasttrain.engine.folds import resume_folds, train_folds
from fasttrain.engine.limits import Limits
from fasttrain.recipe import resolve
train = {function}
train(resolve(sys.argv[1]), data=sys.argv[2], run=sys.argv[3], device="cpu")
"""


def kill_before_summary(recipe, data: Path, run: Path, function: str) -> None:
    path = run.parent / "recipe.yaml"
    path.write_text(recipe.as_yaml())
    program = KILLED_BEFORE_ITS_SUMMARY.format(module="run", function=function)
    done = subprocess.run([sys.executable, "-c", program, path, data, run], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (run / "summary.json").exists()


def test_scores_of_cases_are_there_after_a_kill_before_the_summary(
    tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill_before_summary(tiny(), phantoms, run, "train")
    # Told to stop while they are made again: the run is not over yet
    again = Heard(lambda event: isinstance(event, Message) and "validated again" in event.text)
    result = resume(run, observers=[again], stop=again.stop)
    assert (result.exit_code, result.summary["status"]) == (143, "stopped")
    heard = went_on(run)
    summary = json.loads((run / "summary.json").read_text())
    assert heard.steps == []
    assert summary["status"] == "done"
    assert summary["cases"] == whole_run.summary["cases"]
    assert summary["best"] == whole_run.summary["best"]
    assert len(read_metrics(run / "metrics.csv")) == 4
    # Where they stand, nothing is validated
    assert not any("validated again" in text for text in went_on(run).told)


def test_all_cases_are_pooled_after_a_fold_was_killed_before_its_summary(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(data__split={"kind": "kfold", "folds": 2}, training__epochs=1)
    run = tmp_path / "all"
    kill_before_summary(recipe, phantoms, run, "train_folds")
    whole = resume_folds(run, data=phantoms, device="cpu")
    assert len(whole.summary["cases"]) == 6
    # A fold that ended without them, as earlier versions left it
    path = run / "fold_0/summary.json"
    fold = json.loads(path.read_text())
    path.write_text(json.dumps({**fold, "cases": {}}))
    (run / "summary.json").unlink()
    again = resume_folds(run, data=phantoms, device="cpu")
    assert again.summary["cases"] == whole.summary["cases"]


def test_a_fold_that_is_gone_beside_a_begun_one_is_told(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(data__split={"kind": "kfold", "folds": 2}, training__epochs=1)
    run, heard, stop = tmp_path / "all", Heard(), StopRequest()

    def watch(fold: int, folds: int) -> list[Heard]:
        heard.at = lambda event: isinstance(event, StepLogged) and fold == 1 and stop.ask("a test", 143) is None
        heard.stop = stop
        return [heard]

    train_folds(recipe, data=phantoms, run=run, device="cpu", stop=stop, watch=watch)
    assert heard.warned == []
    shutil.rmtree(run / "fold_0")
    after = Heard()
    result = resume_folds(run, data=phantoms, device="cpu", watch=lambda fold, folds: [after])
    assert any("fold_0" in text and "trained anew" in text for text in after.warned)
    assert len(result.summary["cases"]) == 6


def test_a_run_is_not_begun_anew_where_its_table_knows_of_epochs(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "events.jsonl").write_text("")
    (run / "summary.json").unlink()
    before = (run / "metrics.csv").read_bytes()
    with pytest.raises(StorageError, match="metrics.csv tells of 3 epochs that .*events.jsonl knows nothing of"):
        resume(run)
    assert (run / "metrics.csv").read_bytes() == before


def test_a_run_is_not_begun_anew_where_its_summary_knows_of_a_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for name in ("events.jsonl", "metrics.csv"):
        (run / name).unlink()
    with pytest.raises(StorageError, match="summary.json tells of one"):
        resume(run)


def test_a_run_without_a_checkpoint_begins_again(tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    """Killed in its second epoch, before the first checkpoint: the log knows of the epoch, and that none was written."""
    run, heard = tmp_path / "run", Heard(lambda event: getattr(event, "step", 0) == 7)
    train(
        tiny(output__checkpoint_every="3 epochs"),
        data=phantoms,
        run=run,
        device="cpu",
        observers=[heard],
        stop=heard.stop,
    )
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    events = [line for line in (run / "events.jsonl").read_text().splitlines() if '"CheckpointSaved"' not in line]
    (run / "events.jsonl").write_text("\n".join(events) + "\n")
    heard = went_on(run)
    assert any("no checkpoint was written yet: all 7 steps are taken again" in text for text in heard.told)
    assert losses(run) == losses(whole_run.run)
    assert heard.warned == []


@pytest.mark.parametrize(
    "line",
    [
        '{"time": "2026-01-01T00:00:00+00:00", "event": "StepLogged", "epoch": 3}',
        '{"time": "2026-01-01T00:00:00+00:00", "event": "RunStarted", "resumed_step": "x"}',
        '{"time": "0001-01-01T00:00:00", "event": "EpochEnded", "epoch": [1], "step": 1e999}',
        "[" * 100_000,
        '{"event": ' + "[" * 100_000,
    ],
    ids=["no step", "no number", "no time", "deep", "deep record"],
)
def test_a_line_that_somebody_edited_is_no_bug(line: str, run: Path, whole_run: RunResult) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    went_on(run)
    rows = [row["train_loss"] for row in read_metrics(run / "metrics.csv")]
    assert rows == [row["train_loss"] for row in read_metrics(whole_run.run / "metrics.csv")]


def test_a_folder_in_place_of_a_file_is_found_before_training(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    os.rename(run / "checkpoints/best.pt", run / "best")
    heard = Heard()
    with pytest.raises(StorageError, match="summary.json is a folder, and the run writes a file there"):
        resume(run, observers=[heard])
    assert heard.steps == []
    (run / "summary.json").rmdir()
    resume(run, observers=[heard])
    assert heard.steps


def test_money_that_was_spent_is_not_forgotten_with_the_log(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, price = tmp_path / "run", 3.0
    heard = Heard(lambda event: getattr(event, "step", 0) == 7)
    limits = Limits(price_per_hour=price)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[heard], stop=heard.stop, limits=limits)
    summary = json.loads((run / "summary.json").read_text())
    summary["hours"]["run"], summary["cost"]["run"] = 21 / price, 21.0
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "events.jsonl").write_text("")
    told = went_on(run, limits=Limits(max_cost=12.0, price_per_hour=price))
    assert told.steps == []
    assert any("does not tell of all that the run took" in text for text in told.warned)
    assert any("the run has cost 21.0" in text for text in told.told)
    # The summary that stands now may be lost as well: a start tells of what was before it
    wider = Heard(lambda event: getattr(event, "step", 0) == 9)
    resume(run, observers=[wider], stop=wider.stop, limits=Limits(max_cost=1000.0, price_per_hour=price))
    assert wider.steps
    (run / "summary.json").unlink()
    again = went_on(run, limits=Limits(max_cost=12.0, price_per_hour=price))
    assert again.steps == []
    assert again.warned == []


def test_a_log_that_is_whole_costs_what_it_tells(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Heard(lambda event: getattr(event, "step", 0) == 7)
    limits = Limits(price_per_hour=36.0)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[heard], stop=heard.stop, limits=limits)
    assert went_on(run, limits=limits).warned == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["attempts"] == 2
    assert summary["cost"]["run"] == pytest.approx(36 * summary["hours"]["run"], rel=1e-3)
