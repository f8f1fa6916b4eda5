"""The drill: what it trains, what it compares, what it counts as lost, and one with real processes and a real SIGKILL."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fasttrain import train
from fasttrain.cli.drill_command import _print
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError, MachineError, RecipeError, StorageError
from fasttrain.machine.folder_lock import hold
from fasttrain.studies.drill.comparing import ROUNDING, Difference, difference_beyond_spread, first_difference
from fasttrain.studies.drill.drill import SAVING, Drill, Wishes, clear_left_overs
from fasttrain.studies.drill.life import EventTail, _as_error
from fasttrain.studies.drill.part import MOST_CASES, part_of
from fasttrain.studies.drill.report import Kill, Report, kills_of
from fasttrain.studies.drill.shape import Shape

SHAPE = Shape(3, 4, "0.05s", "off", False, False)


def run_of(folder: Path, losses: list[float | None], again: dict[int, float] | None = None, dice: float = 0.5) -> Path:
    """A run's records: a loss a step, some of them taken again, a row of two epochs."""
    folder.mkdir(parents=True)
    steps = [*enumerate(losses, 1), *(again or {}).items()]
    lines = [json.dumps({"event": "StepLogged", "step": step, "loss": loss}) for step, loss in steps]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"event": "StepLo']))
    rows = [f"{epoch},{2 * epoch},{time.time()},0.5,{dice}" for epoch in (1, 2)]
    (folder / "metrics.csv").write_text("\n".join(["epoch,step,seconds,train_loss,val_dice", *rows, ""]))
    return folder


LOSSES = [1.0, 0.9, 0.8, 0.7]


def test_equal_runs_are_equal_whatever_was_taken_again(tmp_path: Path) -> None:
    unbroken = run_of(tmp_path / "a", LOSSES)
    assert first_difference(unbroken, run_of(tmp_path / "b", LOSSES, {3: 0.8, 4: 0.7})) is None


@pytest.mark.parametrize(
    ("broken", "step", "text"),
    [
        (
            {"losses": [1.0, 0.9, 0.8000000000000002, 0.6]},
            3,
            "its loss is 0.8000000000000002, and 0.8 in the unbroken run",
        ),
        ({"losses": [1.0, 0.9, 0.8]}, 4, "its loss is not there"),
        ({"losses": LOSSES, "again": {2: 0.91}}, 2, "0.91 when it was taken again"),
        ({"losses": LOSSES, "dice": 0.25}, 2, "val_dice of epoch 1 is 0.25, and 0.5 in the unbroken run"),
        ({"losses": [1.0, None, 0.8, 0.7]}, 2, "its loss is null"),
    ],
)
def test_the_first_difference_is_named(broken: dict, step: int, text: str, tmp_path: Path) -> None:
    found = first_difference(run_of(tmp_path / "a", LOSSES), run_of(tmp_path / "b", **broken))
    assert found is not None
    assert found.step == step
    assert text in found.text


def test_on_a_gpu_runs_may_lie_as_far_apart_as_unbroken_ones(tmp_path: Path) -> None:
    one, other = run_of(tmp_path / "a", LOSSES), run_of(tmp_path / "b", [1.0, 0.9, 0.8008, 0.701])
    near = run_of(tmp_path / "c", [1.0, 0.9 * (1 + ROUNDING / 2), 0.803, 0.7])
    spread, found = difference_beyond_spread((one, other), near)
    assert found is None
    assert spread.unbroken == pytest.approx(0.001 / 0.7)
    # Before two unbroken runs part at all, a run that does is another one
    early = run_of(tmp_path / "d", [1.0, 0.905, 0.8, 0.7])
    _, found = difference_beyond_spread((one, other), early)
    assert found is not None
    assert found.step == 2
    far = run_of(tmp_path / "e", [1.0, 0.9, 0.8, 0.72])
    _, found = difference_beyond_spread((one, other), far)
    assert found is not None
    assert found.step == 4


def test_what_a_kill_costs() -> None:
    """Killed in training, at the next start, and in the life after that."""
    lives = [
        SimpleNamespace(
            started=True, times={1: 10.0, 2: 11.0, 3: 12.0}, step=3, resumed_step=None, first_step_seconds=5.0
        ),
        SimpleNamespace(started=False, times={}, step=0, resumed_step=None, first_step_seconds=None),
        SimpleNamespace(started=True, times={3: 40.0, 4: 41.0}, step=4, resumed_step=2, first_step_seconds=6.0),
        SimpleNamespace(started=True, times={3: 60.0}, step=9, resumed_step=2, first_step_seconds=7.0),
    ]
    found = kills_of(lives, ["training", "starting", "saving"], [12.5, 20.0, 41.5], 1.0)
    assert found == [
        Kill("training", 3, 2, 1.5, None),
        Kill("starting", 2, 2, 0.0, 6.0),
        Kill("saving", 4, 2, 2.5, 7.0),
    ]
    assert [kill.lost_steps for kill in found] == [1, 0, 2]


def test_the_part_is_the_recipe_but_for_its_length(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(training__iterations_per_epoch=None, training__early_stopping={"patience": 3}).recipe
    part, root, whole = part_of(recipe, phantoms, SHAPE)
    assert (root, whole) == (phantoms, 4)
    split = part.recipe.data.split
    assert len(split.validation) == 1
    assert 1 <= len(split.train) <= MOST_CASES
    assert not set(split.train) & set(split.validation)
    assert part.recipe.training.early_stopping is None
    for section in ("network", "loss", "optimizer", "schedule", "augment", "patch"):
        assert getattr(part.recipe, section) == getattr(recipe, section)
    assert "lists" in part.as_yaml()
    with pytest.raises(DataError):
        part_of(tiny(data__source={"kind": "nnunet"}).recipe, tmp_path / "none", SHAPE)


def test_a_tail_reads_on_over_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.new() == []
    with path.open("w") as file:
        file.write('{"step": 1}\n{"ste')
        file.flush()
        assert tail.new() == [{"step": 1}]
        file.write('p": 2}\nno json\n[1]\n{"step": 3}\n')
    assert tail.new() == [{"step": 2}, {"step": 3}]
    assert EventTail(path).new() == []


def test_left_overs_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    for name in (".drill-demo-1", ".drill-demo-2", "demo-20260101-120000"):
        (tmp_path / name / "broken").mkdir(parents=True)
    held = hold(tmp_path / ".drill-demo-2")
    try:
        clear_left_overs(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".drill-demo-2", "demo-20260101-120000"]
    finally:
        held.release()
    clear_left_overs(tmp_path / "none")


def drill_in(runs: Path, recipe, data: Path, stop: StopRequest | None = None, **wishes) -> Drill:
    return Drill(recipe, data, "cpu", Wishes(runs=runs, **wishes), lambda event: None, stop or StopRequest())


def test_a_run_that_is_killed_while_it_saves(tiny, phantoms: Path, tmp_path: Path, capsys) -> None:
    """The heart of a drill, its length given: a kill and a resume against an unbroken run; then a loss that is another."""
    drill = drill_in(tmp_path, tiny().recipe, phantoms, kills=1)
    drill.folder.mkdir()
    drill._shape = replace(SHAPE, checkpoint_every="2 steps")
    drill.report.steps, drill.report.step_seconds, drill.report.start_seconds = 12, 0.05, 0.1
    drill._random.shuffle = lambda moments: moments.__setitem__(0, SAVING)
    part, root, _ = part_of(drill.recipe, phantoms, drill._shape)
    unbroken = train(part, data=root, run=drill.folder / "unbroken", device="cpu").run
    broken = drill._broken()
    assert first_difference(unbroken, broken) is None
    (kill,) = drill.report.kills
    assert kill.moment == SAVING
    assert 0 <= kill.lost_steps <= 4
    assert kill.restart_seconds > 0
    drill.report.note_saves(SimpleNamespace(saves=[{"seconds": 0.25, "mib": 12.0, "pause_seconds": 0.01}]))
    _print(drill.report)
    assert "every loss and every score is that of the unbroken run, bit for bit" in capsys.readouterr().out
    document = json.loads(json.dumps(drill.report.record(), allow_nan=False))
    assert document["worst_loss"]["steps"] == kill.lost_steps
    events = (broken / "events.jsonl").read_text().splitlines()
    resumed = max(index for index, line in enumerate(events) if '"RunStarted"' in line)
    changed = [line.replace('"loss": ', '"loss": 1') if index > resumed else line for index, line in enumerate(events)]
    (broken / "events.jsonl").write_text("\n".join(changed))
    drill.report.difference = first_difference(unbroken, broken)
    drill._clear()
    assert drill.report.difference.step == kill.resumed_step + 1
    kept = Path(drill.report.kept)
    assert not kept.name.startswith(".")
    assert (kept / "broken/events.jsonl").exists()
    assert not list(kept.glob("*/checkpoints"))
    _print(drill.report)
    assert f"DIFFERENT: step {kill.resumed_step + 1}: " in capsys.readouterr().out


def children_of(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_stop_leaves_no_process_and_no_folder(tiny, phantoms: Path, tmp_path: Path) -> None:
    stop = StopRequest()

    class StopsItself(Drill):
        def _check(self) -> None:
            stop.ask("a test", 130)
            super()._check()

    drill = StopsItself(tiny().recipe, phantoms, "cpu", Wishes(runs=tmp_path / "runs"), lambda event: None, stop)
    with pytest.raises(Stopped):
        drill.run()
    assert list((tmp_path / "runs").iterdir()) == []
    assert not [child for child in children_of(os.getpid()) if b"drill" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_drill_that_is_itself_killed_leaves_no_process() -> None:
    """Its run ends with it, on Linux, though its stdin stays open (here it is the test's)."""
    if sys.platform != "linux":
        pytest.skip("Linux alone ends a process with its parent")
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'fasttrain.studies.drill.process'], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    waits = 0
    while waits < 15:
        # It waits for its task, with all that comes before behind it
        time.sleep(0.02)
        waits = waits + 1 if state_of(child) == "S" else 0
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10.0
    while state_of(child) not in (None, "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state_of(child) in (None, "Z")
    parent.stdin.close()


def state_of(process: int) -> str | None:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@pytest.mark.parametrize(
    ("log", "code", "said", "exit_code"),
    [
        ("Warning: x\nfasttrain: a.nii.gz is cut short\nfasttrain: b.nii.gz too\n", 3, "b.nii.gz too", 3),
        ("Killed by something\n", -9, "Killed by something", 6),
        ("", 1, "exit code 1", 1),
    ],
)
def test_what_the_run_itself_dies_of_is_the_drills_error(log, code, said, exit_code, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    error = _as_error(code, tmp_path / "log")
    assert isinstance(error, StorageError)
    assert error.exit_code == exit_code
    assert error.faults[-1] == f"the drill's run failed: {said}"
    assert len(error.faults) == max(log.count("fasttrain: "), 1)


def test_a_budget_that_is_too_short_says_what_would_do(tiny, tmp_path: Path) -> None:
    drill = drill_in(tmp_path, tiny().recipe, None, kills=5, budget_seconds=60.0)
    with pytest.raises(
        RecipeError, match=r"--budget 60s is too short: a start takes 9 s here and a step 0\.5 s, so that"
    ):
        drill._affordable_steps(0.5, 9.0)
    assert drill._affordable_steps(0.02, 3.0) > drill._affordable_steps(0.2, 3.0) >= 4


@pytest.mark.parametrize(("budget", "error"), [(5.0, RecipeError), (None, MachineError)])
def test_a_budget_that_is_over_before_anything_was_measured_is_too_short(
    tiny, tmp_path: Path, budget: float | None, error: type
) -> None:
    drill = drill_in(tmp_path, tiny().recipe, None, kills=3, budget_seconds=budget)
    drill._check()
    drill._began -= 10_000
    with pytest.raises(error, match="give it more") as caught:
        drill._check()
    assert ("--budget 5s is too short" in str(caught.value)) is (budget is not None)


def test_a_report_without_kills_can_be_told(capsys) -> None:
    report = Report("demo", "1 epoch", 3, "a CPU", difference=Difference(3, "its loss is 2.0"))
    _print(report)
    told = capsys.readouterr().out
    assert "3 of 3 kills found no time" in told
    assert "DIFFERENT: step 3: its loss is 2.0" in told
