"""Owns the process that trials are forked from: it has imported torch and fasttrain, and never touches a GPU.

So a trial begins in a fraction of a second in a process of its own, from which nothing leaks into the next. The server reads a
line of JSON a trial from stdin, and writes lines of JSON to stdout: what a trial tells while it goes on, and how it ended. It is
ended at its time limit, on the line `end`, and with this process and the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fasttrain.own_process import end_with_parent

_LOOK_SECONDS = 0.05


def main() -> None:
    """Serves, or performs one trial where the arguments name its file."""
    if len(sys.argv) == 3:
        _perform(Path(sys.argv[1]), int(sys.argv[2]))
        return
    _load()
    _answer({"ready": True})
    lines = _Lines(0)
    while True:
        line = lines.next(None)
        if line is None:
            return
        if line != b"end" and not _served(json.loads(line), lines):
            return


def _load() -> None:
    """All that a trial would import; none of it may wake a GPU up, since a forked process could not use it then."""
    from fasttrain.engine.preparing import load_for_steps
    from fasttrain.studies import trial  # noqa: F401

    load_for_steps()


def _answer(record: dict[str, Any]) -> None:
    os.write(1, json.dumps(record).encode() + b"\n")


class _Lines:
    """Lines of a descriptor, so that the wait for one can end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = b""
        self.over = False

    def next(self, seconds: float | None) -> bytes | None:
        """The next line; None after so many seconds without one, and where there will be none any more (`over`)."""
        while b"\n" not in self._left:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            piece = os.read(self._descriptor, 65536)
            if not piece:
                self.over = True
                return None
            self._left += piece
        line, self._left = self._left.split(b"\n", 1)
        return line


def _served(request: dict[str, Any], lines: _Lines) -> bool:
    """Runs a trial to its end and tells it; False where nobody is there any more who asked for it."""
    child = os.fork()
    if not child:
        _become_trial(request)
    began, ended_by, status = time.monotonic(), None, None
    while status is None:
        found, code = os.waitpid(child, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(code)
            break
        line = lines.next(_LOOK_SECONDS)
        if ended_by is None:
            if lines.over or line == b"end":
                ended_by = "asked"
            elif time.monotonic() - began > request["limit_seconds"]:
                ended_by = "limit"
        if ended_by is not None:
            _kill(child)
    # Its workers, where it could not end them itself
    _kill(child)
    if lines.over:
        return False
    _answer({"ended": {"status": status, "by": ended_by, "seconds": time.monotonic() - began}})
    return True


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)


def _become_trial(request: dict[str, Any]) -> None:
    code, told = 1, os.dup(1)
    try:
        os.setsid()
        # Elsewhere than on Linux the server ends its trials when its own stdin closes
        end_with_parent()
        nothing, log = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666),
        )
        for here, there in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        # Whatever woke CUDA up in the server, the trial need not fail of it
        if torch.cuda._is_in_bad_fork():
            os.set_inheritable(told, True)
            words = [sys.executable, "-m", "fasttrain.studies.trial_server", request["task"], str(told)]
            os.execv(sys.executable, words)
        _perform(Path(request["task"]), told)
        code = 0
    except BaseException as error:
        import traceback

        from fasttrain.errors import FasttrainError, exit_code_of

        with contextlib.suppress(Exception):
            traceback.print_exc()
        # What could not be measured at all, or not be written down
        faults = (
            error.faults
            if isinstance(error, FasttrainError)
            else (" ".join(f"{type(error).__name__}: {error}".split()),)
        )
        failure = {"failed": {"faults": list(faults), "exit_code": exit_code_of(error)}}
        with contextlib.suppress(OSError):
            os.write(told, json.dumps(failure).encode() + b"\n")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Nothing of the server's is to be closed or flushed twice
        os._exit(code)


def _perform(path: Path, told: int) -> None:
    """Performs the trial whose task lies in a file, and writes its answer beside it."""
    from fasttrain.run_folder import write_json
    from fasttrain.studies.task import Task
    from fasttrain.studies.trial import emitting, perform

    task = Task(**json.loads(path.read_text(encoding="utf-8")))
    found = perform(task, emitting(told))
    write_json(path.with_suffix(".answer.json"), found)


if __name__ == "__main__":
    main()
