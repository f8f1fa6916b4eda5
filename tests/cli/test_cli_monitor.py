"""`monitor` against runs that real processes train: one at work and then killed, one that ended; on a terminal and as JSON."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import made_run

from fasttrain.cli import main
from fasttrain.engine.run import RunResult
from fasttrain.telemetry.metrics_csv import read_metrics

PROGRAM = [sys.executable, "-m", "fasttrain"]
WITHOUT_TORCH = "import sys; from fasttrain.cli import main; code = main._guarded(sys.argv[1:], True); "
WITHOUT_TORCH += "assert not {'torch', 'monai', 'matplotlib'} & set(sys.modules); sys.exit(code)"
HERE = Path(__file__).parents[2]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE), "TERM": "xterm-256color", "COLUMNS": "120"}


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.1)


def document(*arguments: object, where: Path) -> dict:
    """What `monitor --json` prints, in a process that must not load torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "monitor", *map(str, arguments), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=where, env=environ(), timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def at_work(tmp_path: Path, tiny_values: dict, phantoms: Path) -> Iterator[subprocess.Popen]:
    """A process that trains under ./runs for longer than any test takes, one epoch closed."""
    values = {**tiny_values, "training.epochs": 5000}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [*PROGRAM, "train", "-r", "demo", "--data", phantoms, "--device", "cpu", "--run", "runs/it", *sets]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            [*map(str, command), "--price-per-hour", "2.5"], cwd=tmp_path, env=environ(), stdout=log, stderr=log
        )
    try:
        until(lambda: child.poll() is not None or len(read_metrics(tmp_path / "runs/it/metrics.csv")) > 1)
        assert child.poll() is None, (tmp_path / "log").read_text()
        yield child
    finally:
        child.kill()
        child.wait()


class Screen:
    """`monitor` on a terminal: of tmux where there is one, else one whose bytes are kept as they come."""

    def __init__(self, where: Path, *arguments: str) -> None:
        self._tmux = ["tmux", "-S", str(where / "tmux")] if shutil.which("tmux") else []
        self._seen = b""
        self._child: subprocess.Popen | None = None
        command = [*PROGRAM, "monitor", *arguments]
        if self._tmux:
            line = " ".join(command) + "; echo ended with $?; sleep 100"
            window = ["new-session", "-d", "-x", "120", "-y", "40", "-c", str(where), line]
            subprocess.run([*self._tmux, "-f", "/dev/null", *window], check=True, env=environ())
            return
        self._terminal, theirs = os.openpty()
        os.set_blocking(self._terminal, False)
        line = " ".join(command) + "; echo ended with $?"
        self._child = subprocess.Popen(["sh", "-c", line], cwd=where, env=environ(), stdout=theirs, stderr=theirs)
        os.close(theirs)

    def text(self) -> str:
        if self._tmux:
            return subprocess.run(
                [*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True
            ).stdout
        with contextlib.suppress(OSError):
            self._seen += os.read(self._terminal, 1 << 16)
        return self._seen.decode(errors="replace")

    def close(self) -> None:
        if self._tmux:
            subprocess.run([*self._tmux, "kill-server"], check=False)
        elif self._child is not None:
            self._child.kill()
            self._child.wait()
            os.close(self._terminal)


def test_a_run_at_work_and_killed(at_work: subprocess.Popen, tmp_path: Path) -> None:
    now = document(where=tmp_path)
    assert now["run"] == "runs/it"
    assert (now["status"], now["process"]["id"]) == ("running", at_work.pid)
    assert now["seconds_since_last_sign"] < 30
    assert 1 <= now["epochs_done"] < now["epochs"] == 5000
    assert now["seconds_left"] > 0
    assert now["cost_projected"] > now["cost"] > 0
    assert now["scores"]["dice"] is not None
    assert now["gpu"]["now"] is None
    assert now["gpu"]["told_by_run"] == {"utilisation": None, "gib": None}
    screen = Screen(tmp_path, "--every", "0.3")
    try:
        until(lambda: "running" in screen.text() and "patches/s" in screen.text())
        assert f"process {at_work.pid} is alive" in screen.text()
        before = document("runs/it", where=tmp_path)["step"]
        until(lambda: document("runs/it", where=tmp_path)["step"] > before)
        at_work.send_signal(signal.SIGKILL)
        at_work.wait()
        until(lambda: "ended with 0" in screen.text())
        assert f"killed: process {at_work.pid} is gone" in screen.text()
        assert "fasttrain resume runs/it" in screen.text()
    finally:
        screen.close()
    now = document("runs/it", where=tmp_path)
    assert now["status"] == "killed"
    assert now["exit_code"] is None
    assert now["seconds_left"] > 0
    assert now["resume_command"] == "fasttrain resume runs/it"


def test_a_run_that_ended(whole_run: RunResult, tmp_path: Path) -> None:
    now = document(whole_run.run, where=tmp_path)
    assert (now["status"], now["exit_code"], now["told"]) == ("done", 0, "ended, done")
    assert (now["epochs_done"], now["step"], now["steps"]) == (4, 20, 20)
    assert now["best"]["value"] == whole_run.summary["best"]["value"]
    assert now["hours"] == whole_run.summary["hours"]["run"]
    assert now["seconds_left"] is None
    screen = Screen(tmp_path, str(whole_run.run))
    try:
        until(lambda: "ended with 0" in screen.text())
        assert "ended, done" in screen.text()
    finally:
        screen.close()


def test_off_a_terminal_it_prints_plain_lines_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", epochs=2, status=None, of=9)
    folder.claim()
    child = subprocess.Popen(
        [*PROGRAM, "monitor", "run", "--every", "0.2"], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    assert first.startswith("running  epoch 2 of 9")
    folder.release()
    rest, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "\x1b" not in first + rest
    assert "killed" in rest


def test_once_and_what_else_is_at_work(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _called(capsys, "monitor", "--once")[0] == 2
    code, _, err = _called(capsys, "monitor", "nowhere")
    assert code == 2
    assert err.splitlines() == ["fasttrain: nowhere holds no run; name a run folder, or see `fasttrain runs list`"]
    made_run(tmp_path / "runs" / "old", status=None)
    time.sleep(0.01)
    made_run(tmp_path / "runs" / "new")
    code, out, err = _called(capsys, "monitor", "--once")
    assert code == 0
    assert "runs/new" in out.splitlines()[0]
    assert err == ""
    holder = "from pathlib import Path; from fasttrain.run_folder import RunFolder; import time; "
    holder += "folder = RunFolder(Path('runs/old')); folder.claim(); print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", holder], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        _, _, err = _called(capsys, "monitor", "--once")
        assert "runs/old is at work" in err
    finally:
        child.kill()
        child.communicate()


def test_ctrl_c_leaves_it(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", epochs=2, status=None, of=9)
    folder.claim()
    child = subprocess.Popen(
        [*PROGRAM, "monitor", "run"], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    folder.release()
    assert child.returncode == 130
    assert b"Traceback" not in err


def _called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
