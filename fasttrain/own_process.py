"""Owns how fasttrain starts a process of its own that runs a module and is spoken to by lines through pipes, and how it ends; and
how no process is begun that nobody knows of.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0
_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Ctrl-C last: its answer may be an exception, and by then the others' are to be back in place."""


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


@contextlib.contextmanager
def signals_held() -> Iterator[list[int]]:
    """Signals that come in the scope are answered at its end; gives those that have come, for the caller to drop.

    A program has begun before its `Popen` is there to be kept: Ctrl-C in between would leave it running, unknown to whoever is to
    end it. Elsewhere than in the main thread, which alone answers signals, nothing is done. A mask would not do, since programs
    inherit it.
    """
    heard: list[int] = []
    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in reversed(_HELD):
            # An ignored one stays so for the program, too
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                former[number] = signal.signal(number, lambda one, _: heard.append(one))
    try:
        yield heard
    finally:
        for number in _HELD:
            if number in former:
                signal.signal(number, former[number])
        for one in heard:
            signal.raise_signal(one)


def end_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it dies, however it dies; elsewhere nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
