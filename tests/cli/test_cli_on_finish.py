"""--on-finish with real processes: it follows every final end, never one by SIGTERM, and changes no exit code."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pod_stubs import ROOT, Place

from fasttrain.cli.on_finish import OnFinish
from fasttrain.errors import MachineError, RecipeError

NOTES = 'echo "$FASTTRAIN_EXIT_CODE $FASTTRAIN_RUN" >>NOTED; echo said by the command; exit 9'


class Run:
    """A `fasttrain train` of the tiny demo, in a process and a folder of its own."""

    def __init__(self, folder: Path, phantoms: Path, values: dict, *more: str) -> None:
        folder.mkdir()
        self.noted, self.run = folder / "noted", folder / "run"
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        command = [
            sys.executable,
            "-m",
            "fasttrain",
            "train",
            "--recipe",
            "demo",
            "--data",
            phantoms,
            "--run",
            self.run,
            *sets,
        ]
        self.command = NOTES.replace("NOTED", str(self.noted))
        command += ["--device", "cpu", "--json", "--on-finish", self.command, *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, **pipes)

    def wait_for(self, event: str) -> None:
        events, until = self.run / "events.jsonl", time.monotonic() + 120
        while not (events.exists() and f'"{event}"' in events.read_text()):
            assert self.process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def notes(self) -> list[str]:
        return self.noted.read_text().splitlines() if self.noted.exists() else []


def test_it_follows_success_and_failure_and_never_sigterm(tiny_values: dict, phantoms: Path, tmp_path: Path) -> None:
    # At once, since most of the time is the start of Python
    long = {**tiny_values, "training.epochs": 10_000}
    broken = tmp_path / "data"
    broken.mkdir()
    plain = {"data.source": {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}}
    limited = Run(tmp_path / "limited", phantoms, long, "--until-dice", "0.000001", "--price-per-hour", "2.5")
    told = Run(tmp_path / "told", phantoms, long)
    faulty = Run(tmp_path / "faulty", broken, {**tiny_values, **plain})

    told.wait_for("StepLogged")
    told.process.send_signal(signal.SIGTERM)
    code, out, err = told.end()
    assert code == 143, err
    assert told.notes() == []
    # Once, and with what is to follow then
    assert err.count("go on with") == 1
    assert f"fasttrain resume {told.run} --on-finish {shlex.quote(told.command)}" in err.splitlines()[-1]

    code, out, err = faulty.end()
    assert code == 3
    # There is no run of it
    assert faulty.notes() == ["3 "]
    assert json.loads(out)["exit_code"] == 3
    assert "--on-finish failed (exit code 9)" in err.splitlines()[-1]
    # The run's own errors came first
    assert err.splitlines()[-2] == "said by the command"
    assert str(broken) in err.splitlines()[0]

    code, out, err = limited.end()
    assert code == 0, err
    assert limited.notes() == [f"0 {limited.run}"]
    assert json.loads(out)["stopped_by"] == "--until-dice 1e-06"
    assert err.splitlines()[-2] == "said by the command"
    assert " USD" in err


def test_a_refusal_after_the_options_were_read_is_an_end_too(tmp_path: Path) -> None:
    """A start command with a misspelt recipe must not bill for ever."""
    place = Place(tmp_path).on_a_pod()
    command = [sys.executable, "-m", "fasttrain", "train", "--recipe", "hipocampus", "--on-finish", "stop-pod"]
    done = subprocess.run(command, **place.options({"PYTHONPATH": str(Path(__file__).resolve().parents[2])}))
    assert done.returncode == 2
    assert place.calls("runpodctl") == ["pod stop abc"]
    assert "will be stopped when the run has ended; a stopped pod still bills its volume disk" in done.stderr


def test_elsewhere_stop_pod_is_refused_before_anything_else(tmp_path: Path) -> None:
    place = Place(tmp_path)
    command = [sys.executable, "-m", "fasttrain", "train", "--recipe", "hipocampus", "--on-finish", "stop-pod"]
    done = subprocess.run(command, **place.options({"PYTHONPATH": str(Path(__file__).resolve().parents[2])}))
    assert done.returncode == 4
    assert "stop-pod works on a RunPod pod, and this is none" in done.stderr


@pytest.fixture
def asked(tmp_path: Path):
    """An OnFinish that would leave a mark."""
    finish = OnFinish()
    finish.ask(f"touch {tmp_path}/mark")
    return finish, tmp_path / "mark"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 7, 130, 141])
def test_every_final_code_is_followed(asked, code: int) -> None:
    finish, mark = asked
    finish.carry_out(code, seconds_to_stay=0)
    assert mark.exists()
    mark.unlink()
    # Once
    finish.carry_out(code, seconds_to_stay=0)
    assert not mark.exists()


def test_143_is_not(asked) -> None:
    finish, mark = asked
    finish.carry_out(143)
    assert not mark.exists()


def test_a_second_ctrl_c_keeps_it_from_running(asked, capsys: pytest.CaptureFixture[str]) -> None:
    finish, mark = asked
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        finish.carry_out(130, seconds_to_stay=30)
    finally:
        signal.signal(signal.SIGINT, former)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not mark.exists()
    assert "Ctrl-C now leaves it out" in capsys.readouterr().err


def test_a_pod_that_cannot_be_stopped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path).on_a_pod("broken")
    for name in ("PATH", "RUNPOD_POD_ID", "STUB_RUNPODCTL", "STUB_LOG"):
        monkeypatch.setenv(name, place.environ[name])
    monkeypatch.setattr("fasttrain.machine.runpod.time.sleep", lambda seconds: None)
    finish = OnFinish()
    finish.ask("stop-pod")
    finish.carry_out(0)
    assert "could NOT be stopped and goes on being billed: Error: no route to host" in capsys.readouterr().err


def test_what_cannot_be_carried_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_POD_ID", raising=False)
    with pytest.raises(RecipeError, match="--on-finish is empty"):
        OnFinish().ask("  ")
    with pytest.raises(MachineError, match="--on-finish 'COMMAND'"):
        OnFinish().ask("stop-pod")


def tree_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(one) for one in found] + [below for one in found for below in tree_of(int(one))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends_with_all_below(process: subprocess.Popen, number: signal.Signals, least: int) -> None:
    """A signal to a command whose end has begun leaves none of its processes, of which there are so many at least."""
    time.sleep(0.1)
    below = tree_of(process.pid)
    assert len(below) >= least
    process.send_signal(number)
    assert process.wait(timeout=10) == 2
    time.sleep(0.1)
    assert not any(alive(pid) for pid in below)


def end_group(head: int) -> None:
    """What a command that should have ended left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(head, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_hanging_command_is_ended_with_all_that_it_started(
    number: signal.Signals, stubborn: bool, tmp_path: Path
) -> None:
    command = ("trap '' TERM HUP INT; " if stubborn else "") + "echo begun; sleep 300 & sleep 300; wait"
    words = [sys.executable, "-m", "fasttrain", "train", "--recipe", "nowhere", "--on-finish", command]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        while "begun" not in process.stderr.readline():
            assert process.poll() is None
        ends_with_all_below(process, number, least=2)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_runpodctl_that_hangs_is_ended_by_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    place = Place(tmp_path).on_a_pod("hanging")
    words = [sys.executable, "-m", "fasttrain", "train", "--recipe", "nowhere", "--on-finish", "stop-pod"]
    process = subprocess.Popen(words, **place.options({"PYTHONPATH": str(ROOT)}))
    try:
        until = time.monotonic() + 30
        while not place.calls("runpodctl"):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        ends_with_all_below(process, number, least=1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["stop-pod", "runpodctl pod stop abc"])
def test_a_signal_as_the_command_begins_ends_it(command: str, number: signal.Signals, tmp_path: Path) -> None:
    """The program is under way, and its `Popen` not there yet."""
    place = Place(tmp_path).on_a_pod("hanging")
    program = (
        "import os, subprocess, time\n"
        "from fasttrain.cli import main, on_finish\n"
        "class Late(subprocess.Popen):\n"
        "    def __init__(self, *given, **options):\n"
        "        super().__init__(*given, **options)\n"
        "        print(self.pid, flush=True)\n"
        f"        while not os.path.exists({str(place.log / 'runpodctl')!r}):\n"
        "            time.sleep(0.02)\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "subprocess.Popen = Late\n"
        f"on_finish.ON_FINISH.ask({command!r})\n"
        "main.run()\n"
    )
    options = place.options({"PYTHONPATH": str(ROOT)})
    process = subprocess.Popen([sys.executable, "-c", program, "--version"], **options)
    assert process.stdout is not None
    pid = next(int(line) for line in process.stdout if line.strip().isdigit())
    try:
        assert process.wait(timeout=30) == 0
        time.sleep(0.1)
        assert not alive(pid)
        assert process.stderr is not None
        assert process.stderr.read().count("interrupted") == int(number == signal.SIGINT)
    finally:
        process.kill()
        end_group(pid)
        process.communicate()


def test_ctrl_c_twice_ends_a_command_that_will_not(tmp_path: Path) -> None:
    program = (
        "from fasttrain.cli import main, on_finish\n"
        "on_finish.ON_FINISH.ask('trap \\'echo asked\\' TERM; echo $$; echo begun; while :; do sleep 0.1; done')\n"
        "main.run()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    pid = int(process.stderr.readline())
    try:
        for heard in ("begun\n", "asked\n"):
            while process.stderr.readline() != heard:
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        end_group(pid)
    assert (process.returncode, err) == (0, "fasttrain: --on-finish was interrupted\n")


@pytest.fixture
def at_work(tiny_values: dict, phantoms: Path, tmp_path: Path):
    """A run that goes on and on, in another process."""
    run = Run(tmp_path / "first", phantoms, {**tiny_values, "training.epochs": 10_000})
    run.wait_for("StepLogged")
    yield run
    run.process.kill()
    run.process.communicate()


def test_a_command_that_is_given_twice_ends_nothing(
    at_work: Run, tiny_values: dict, phantoms: Path, tmp_path: Path
) -> None:
    """Of any kind of refusal: the run is at work, and what stops the machine would stop that."""
    noted, run = tmp_path / "noted", at_work.run
    on_finish = ["--on-finish", f"touch {noted}"]
    values = {**tiny_values, "training.epochs": 10_000}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    commands = [
        ["train", "--recipe", "demo", "--data", phantoms, "--run", run, *sets, "--device", "cpu", "--resume", "auto"],
        ["train", "--recipe", "demo", "--data", phantoms, "--run", run],
        ["train", "--recipe", "demmo", "--run", run],
        ["resume", run],
        ["train", "--recipe", "demo", "--run", run, "--max-huors", "3"],
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fasttrain", *words, *on_finish],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **({"FASTTRAIN_EXIT_IN_USE": "75"} if words[0] == "resume" else {})},
        )
        for words in commands
    ]
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m fasttrain "$@"\n')
    wrapper.chmod(0o755)
    loop = [ROOT / "scripts/keep_training.sh", *commands[0][1:-2], *on_finish]
    environ = {**os.environ, "FASTTRAIN": str(wrapper), "PYTHONPATH": str(ROOT)}
    started.append(subprocess.Popen(loop, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environ))
    ended = [(one.communicate(timeout=100)[1], one.returncode) for one in started]
    assert [code for _, code in ended] == [6, 6, 2, 75, 2, 6]
    assert all("--on-finish is left out: another process is at work" in err for err, _ in ended)
    assert sum("is in use by process" in err for err, _ in ended) == 4
    assert not noted.exists()
    # Once that run has ended, a refusal is an end again
    at_work.process.kill()
    at_work.process.wait()
    words = [sys.executable, "-m", "fasttrain", *commands[2], *on_finish]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60).returncode == 2
    assert noted.exists()
