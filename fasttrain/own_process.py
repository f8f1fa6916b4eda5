"""Owns how fasttrain starts a process of its own that runs a module and is spoken to by lines through pipes, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0


def start_own(module: str, stderr: int | IO[bytes] = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts `module` of this very fasttrain, wherever that was imported from, in a session of its own: Ctrl-C is for the process
    that asks to answer.
    """
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def end_own(process: subprocess.Popen[bytes]) -> None:
    """Ends what `start_own` started: its pipes are closed, which it is to end by, and where it does not it is killed."""
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert stream is not None
            stream.close()
    try:
        process.wait(timeout=_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it dies, however it dies; elsewhere nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
