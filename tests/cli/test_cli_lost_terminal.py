"""A terminal that goes away (SIGHUP) is a signal to stop like any other; one that nohup has ignored is none."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fasttrain.checkpoints import read_checkpoint


def words_of(command: str, values: dict, phantoms: Path) -> list[str]:
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    words = [sys.executable, "-m", "fasttrain", command, "--recipe", "demo", "--data", str(phantoms), "--device", "cpu"]
    return [*words, *sets]


def wait_for(holds, seconds: float = 100.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def values(tiny_values: dict) -> dict:
    return {**tiny_values, "training.epochs": 10_000, "output.checkpoint_every": "1h"}


def test_a_run_whose_terminal_goes_away_saves_and_ends(values: dict, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*words_of("train", {**values, "data.workers": 1}, phantoms), "--run", str(run)]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execv(words[0], words)

    def read_on() -> None:
        with contextlib.suppress(OSError):
            while os.read(terminal, 4096):
                pass

    threading.Thread(target=read_on, daemon=True).start()
    try:
        wait_for(lambda: (run / "events.jsonl").exists() and '"EpochEnded"' in (run / "events.jsonl").read_text())
        workers = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 143
    finally:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"], summary["exit_code"]) == ("stopped", "SIGHUP", 143)
    assert read_checkpoint(run / "checkpoints/last.pt")["progress"]["step"] == summary["steps"] > 0
    assert not any(alive(worker) for worker in workers)


def test_what_nohup_began_trains_on(values: dict, phantoms: Path, tmp_path: Path) -> None:
    words = [
        "sh",
        "-c",
        'trap "" HUP; exec "$@"',
        "sh",
        *words_of("train", values, phantoms),
        "--run",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
    events = tmp_path / "run/events.jsonl"
    try:
        wait_for(lambda: events.exists() and '"StepLogged"' in events.read_text())
        process.send_signal(signal.SIGHUP)
        before = events.stat().st_size
        wait_for(lambda: events.stat().st_size > before + 5000)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    finally:
        process.kill()
        process.wait()


def test_a_drill_whose_terminal_goes_away_leaves_nothing(values: dict, phantoms: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(words_of("drill", values, phantoms), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "runs"
    try:
        wait_for(lambda: runs.is_dir() and any(one.name.startswith(".drill-") for one in runs.iterdir()))
        time.sleep(0.5)
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert "the drill was stopped by SIGHUP; nothing of it is left" in err
    assert list(runs.iterdir()) == []
