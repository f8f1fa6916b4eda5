"""An export that a signal ends leaves no process, and nothing half-made."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fasttrain.engine.run import RunResult

CODES = {signal.SIGINT: (130, "Ctrl-C"), signal.SIGTERM: (143, "SIGTERM")}


def ended_by(number: signal.Signals, words: list[str], ready, folder: Path) -> None:
    """Starts an export in `folder`, signals it once it is `ready`, and looks at what it leaves."""
    (folder / "temporary").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "fasttrain", "export", *words, "--out", str(folder / "out/model.ts")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder / "temporary")},
    )
    try:
        until = time.monotonic() + 60
        while not ready(process.pid):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    code, name = CODES[number]
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == f"fasttrain: stopped by {name}"
    assert "Traceback" not in err
    assert psutil.wait_procs(below, timeout=5)[1] == []
    assert {path.name for path in folder.rglob("*")} <= {"out", "temporary"}


@pytest.mark.skipif(importlib.util.find_spec("ignite") is None, reason="needs pytorch-ignite")
@pytest.mark.parametrize("number", list(CODES))
def test_a_bundle_that_monai_tries(whole_run: RunResult, number: signal.Signals, tmp_path: Path) -> None:
    def tried(pid: int) -> bool:
        return any("monai.bundle" in one.cmdline() for one in psutil.Process(pid).children())

    ended_by(number, [str(whole_run.run), "--format", "bundle"], tried, tmp_path)


@pytest.mark.parametrize("number", list(CODES))
def test_a_file_that_is_half_made(whole_run: RunResult, number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written = lambda _: folder.exists() and any(folder.iterdir())  # noqa: E731
    ended_by(number, [str(whole_run.run), "--format", "torchscript"], written, tmp_path)
