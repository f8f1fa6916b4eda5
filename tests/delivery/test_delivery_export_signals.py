"""An export that a signal or a full disk ends leaves no process, and nothing half-made."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_machine import run_with

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


@pytest.mark.skipif(importlib.util.find_spec("ignite") is None, reason="needs pytorch-ignite")
def test_a_full_folder_for_temporary_files_is_no_fault_of_the_bundle(whole_run: RunResult, tmp_path: Path) -> None:
    disk = tmp_path / "temporary"
    disk.mkdir()
    words = ["export", str(whole_run.run), "--format", "bundle", "--out", str(tmp_path / "out/bundle")]
    done = run_with(
        f"import os, sys; from fasttrain.cli.main import run\nsys.argv[1:] = {words!r}\n"
        f"try: run()\nfinally: print(os.listdir({str(disk)!r}))",
        before=f"mount -t tmpfs -o size=8k tmpfs {shlex.quote(str(disk))} && TMPDIR={shlex.quote(str(disk))}",
        namespace=True,
    )
    assert (done.returncode, done.stdout) == (6, "[]\n"), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"fasttrain: {disk} has too little room for the check of the bundle")
    assert list((tmp_path / "out").iterdir()) == []
