"""How a run stands, from its files: at work, killed, ended, resumed since, half written, damaged."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import line, made_run

from fasttrain.history.events_so_far import EventsSoFar
from fasttrain.history.holder import Holder, is_held, named_holder
from fasttrain.history.standing import KILLED, NOT_BEGUN, RUNNING, UNSEEN, RunReader
from fasttrain.history.watching import Watch
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.attempts import read_attempts

_HOLD = """
import sys, time
from pathlib import Path
from fasttrain.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.claim()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold():
    """Another process that has claimed a folder."""
    begun: list[subprocess.Popen] = []

    def held(folder: RunFolder) -> subprocess.Popen:
        child = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
        begun.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield held
    for child in begun:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_lock_is_seen_without_being_taken_and_ends_with_its_process(tmp_path: Path, hold) -> None:
    folder = made_run(tmp_path / "run", status=None)
    assert not is_held(folder)
    child = hold(folder)
    assert is_held(folder)
    assert named_holder(folder) == Holder(child.pid, os.uname().nodename)
    child.kill()
    child.wait()
    assert not is_held(folder)
    # Nothing was disturbed: the folder can be claimed, and looking at one's own claim does not end it
    folder.claim()
    assert not is_held(folder)
    assert RunReader(folder.path).read().status == RUNNING
    looking = "import sys; from pathlib import Path; from fasttrain.history.holder import is_held; "
    looking += "from fasttrain.run_folder import RunFolder; sys.exit(int(is_held(RunFolder(Path(sys.argv[1])))))"
    assert subprocess.run([sys.executable, "-c", looking, str(folder.path)], check=False).returncode == 1
    folder.release()


def test_at_work_then_killed(tmp_path: Path, hold) -> None:
    folder = made_run(tmp_path / "run", epochs=2, status=None, of=10, price=3.6)
    child = hold(folder)
    reader = RunReader(folder.path)
    run = reader.read()
    assert run.status == RUNNING
    assert str(child.pid) in run.told
    now = Watch(folder.path).read()
    assert now["status"] == "running"
    assert (now["epoch"], now["epochs"], now["step"], now["steps"]) == (2, 10, 20, 100)
    assert 80 < now["seconds_left"] <= 90
    assert now["cost_left"] == pytest.approx(now["seconds_left"] / 1000)
    assert now["resume_command"] is None
    child.kill()
    child.wait()
    run = reader.read()
    assert run.status == KILLED
    assert "killed" in run.told
    assert str(child.pid) in run.told
    now = Watch(folder.path).read()
    assert now["seconds_left"] == 90.0
    assert now["resume_command"] == f"fasttrain resume {folder.path}"
    assert now["under_way"] is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"status": "done"}, "ended, done"),
        ({"status": "done", "stopped_by": "--max-hours 2"}, "ended, done by --max-hours 2"),
        ({"status": "stopped", "stopped_by": "SIGTERM", "exit_code": 143}, "ended, stopped by SIGTERM (exit code 143)"),
        ({"status": "failed", "exit_code": 5, "error": "no room\nat all"}, "ended, failed (exit code 5): no room"),
    ],
)
def test_an_ended_run_says_how(tmp_path: Path, more: dict, told: str) -> None:
    run = RunReader(made_run(tmp_path / "run", **more).path).read()
    assert run.status == more["status"]
    assert run.told == told


def test_the_summary_of_an_attempt_before_says_nothing_of_the_one_that_was_killed(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", status="stopped", stopped_by="SIGTERM", exit_code=143)
    assert RunReader(folder.path).read().status == "stopped"
    with folder.events.open("a") as events:
        events.write(line(time.time(), "RunStarted", epochs=9, steps_per_epoch=10, device="A CPU"))
    run = RunReader(folder.path).read()
    assert run.status == KILLED
    assert run.attempts == 2
    assert run.hours is not None
    assert run.hours < 0.1  # of the events, not the hour that the former summary tells of


def test_another_machines_lock_cannot_be_seen(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", status=None)
    folder.lock.write_text("process 17 on some-other-host")
    run = RunReader(folder.path).read()
    assert run.status == UNSEEN
    assert "some-other-host" in run.told
    # An ended one is ended wherever it was
    folder = made_run(tmp_path / "done")
    folder.lock.write_text("process 17 on some-other-host")
    assert RunReader(folder.path).read().status == "done"


def test_half_lines_wait_for_their_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = line(1000, "RunStarted", began=990.0) + line(1001, "StepLogged", step=5, loss=0.5)
    half = line(1002, "StepLogged", step=6, loss=0.25)
    path.write_text(whole + half[:40])
    events = EventsSoFar(path)
    assert events.update()
    assert events.step is not None
    assert events.step["step"] == 5
    assert not events.update()
    path.write_text(whole + half)
    assert events.update()
    assert events.step["step"] == 6
    assert events.attempts[0].seconds == pytest.approx(12)
    # A torn line that was ended later, and bytes that are no text
    with path.open("ab") as file:
        file.write(
            b'{"time": "1970-01-01T00:16:43+00:00", "event": "Ste\n\xff\xfe}\n'
            + line(1010, "StepLogged", step=7).encode()
        )
    events.update()
    assert events.step["step"] == 7
    path.write_text(whole)
    events.update()
    assert events.step["step"] == 5, "a file that became shorter is another one"


def test_a_loss_that_is_no_number_is_no_zero(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", epochs=1, status=None)
    with folder.events.open("a") as events:
        events.write(line(time.time() + 1, "StepLogged", epoch=2, step=11, loss=None, patches_per_second=None))
    now = Watch(folder.path).read()
    assert now["loss"] is None
    assert now["patches_per_second"] is None
    assert now["gpu"]["told_by_run"] == {"utilisation": None, "gib": None}
    assert now["gpu"]["now"] is None
    assert now["train_loss"] == 1.0


def test_damaged_files_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    folder.summary.write_text('{"status": "do')
    folder.environment.write_text("[1, 2]")
    folder.plan.unlink()
    run = RunReader(folder.path).read()
    assert sorted(fault.split(" is ")[0] for fault in run.faults) == ["environment.json", "plan.json", "summary.json"]
    assert run.status == "done", "the events have it as well"
    assert len(run.rows) == 3
    json.dumps(Watch(folder.path).read(), allow_nan=False)
    folder.metrics.write_text("epoch,step,train_loss\n1,10,0.5\ninf,20,0.4\n3,3")
    run = RunReader(folder.path).read()
    assert [row["epoch"] for row in run.rows] == [1.0]
    assert any("metrics.csv" in fault for fault in run.faults)
    # A sound one has no fault
    assert RunReader(made_run(tmp_path / "sound").path).read().faults == []


def test_a_folder_in_which_nothing_was_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.environment.write_text("{}")
    run = RunReader(folder.path).read()
    assert run.status == NOT_BEGUN
    assert run.faults == []
    shutil.rmtree(folder.path)
    assert RunReader(folder.path).read().status == NOT_BEGUN


def test_scores_that_a_resume_took_back_are_none(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", epochs=3, status=None)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:3]))
    run = RunReader(folder.path).read()
    assert run.best == ("val_dice", 0.2, 2)
    assert Watch(folder.path).read()["scores"] is None


def test_all_folds_are_watched_in_the_one_that_is_at_work(tmp_path: Path, hold) -> None:
    whole = RunFolder(tmp_path / "whole")
    whole.path.mkdir()
    whole.recipe.write_text("extends: demo\n")
    whole.folds.write_text(json.dumps({"format": 1, "folds": 3, "device": "cpu"}))
    made_run(whole.fold(0))
    made_run(whole.fold(1), epochs=1, status=None, of=5)
    hold(whole)
    hold(RunFolder(whole.fold(1)))
    now = Watch(whole.path).read()
    assert now["status"] == "running"
    assert now["fold"] == {"run": str(whole.fold(1)), "number": 1, "folds": 3}
    assert [fold["status"] for fold in now["folds"]] == ["done", "running"]
    assert now["seconds_left"] > 150, "the fold to come counts"
    assert now["hours"] > 1.0


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=8), torn=st.integers(0, 90))
def test_read_in_pieces_it_is_what_it_is_at_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], torn: int
) -> None:
    content = (
        line(1000, "RunStarted", began=990.0, price_per_hour=2.0)
        + line(1005, "FirstStep", seconds=5.0, parts={})
        + line(1010, "StepLogged", step=5, loss=0.5)
        + line(1011, "StepLogged", step=6, loss=0.4)[:torn]
        + "\n"
        + line(1020, "EpochEnded", epoch=1, step=10, validation={"dice": 0.5, "seconds": 3.0}, is_best=True)
        + line(1030, "Progress", what="reading «Ä»", done=1, total=3)
        + line(2000, "RunStarted", began=1990.0)
        + line(2010, "StepLogged", step=11)
    ).encode()
    folder = tmp_path_factory.mktemp("pieces")
    whole, pieces = folder / "whole.jsonl", folder / "pieces.jsonl"
    whole.write_bytes(content)
    at_once, slowly = EventsSoFar(whole), EventsSoFar(pieces)
    at_once.update()
    slowly.update()
    with pieces.open("wb", buffering=0) as file:
        ends = sorted(cut % (len(content) + 1) for cut in cuts)
        for start, end in zip([0, *ends], [*ends, len(content)], strict=True):
            file.write(content[start:end])
            slowly.update()
    for name in (
        "starts",
        "started",
        "first_step",
        "step",
        "epoch",
        "validated",
        "under_way",
        "last_sign",
        "validation_seconds",
    ):
        assert getattr(slowly, name) == getattr(at_once, name), name
    assert slowly.attempts == at_once.attempts == read_attempts(whole)
    assert slowly.step is not None
    assert slowly.step["step"] == 11


def test_hours_before_events_that_are_lost_are_counted(tmp_path: Path) -> None:
    """Each start tells of all that was before it, as the run itself reckons it."""
    events = tmp_path / "events.jsonl"
    first = line(1000, "RunStarted", began=1000.0, price_per_hour=2.0) + line(8200, "StepLogged", step=5)
    more = {"began": 9000.0, "price_per_hour": 2.0, "earlier_seconds": 7200.0, "earlier_cost": 4.0}
    second = line(9010, "RunStarted", **more) + line(9100, "StepLogged", step=9)
    for lines in (second, first + second):
        events.write_text(lines)
        so_far = EventsSoFar(events)
        assert so_far.update()
        assert so_far.attempts == read_attempts(events)
        assert sum(attempt.seconds for attempt in so_far.attempts) == pytest.approx(7300)
    events.write_text(line(9010, "RunStarted", began=9000.0) + line(9100, "StepLogged", step=9))
    alone = EventsSoFar(events)
    assert alone.update()
    assert [attempt.seconds for attempt in alone.attempts] == [pytest.approx(100)]
