"""Owns the process that trials are forked from: it has imported torch and fasttrain, and never touches a GPU.

So a trial begins in a fraction of a second in a process of its own, or in one a rank, from which nothing leaks into the next.
The server reads a line of JSON a trial from stdin, and writes lines of JSON to stdout: what a trial tells while it goes on, and
how it ended. It is ended at its time limit, on the line `end`, with this process and the one that started it, and, as a whole, as
soon as one of its ranks fails or dies: the others would wait for that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.own_process import end_with_parent

if TYPE_CHECKING:
    from fasttrain.studies.trial_ranks import Seat

_LOOK_SECONDS = 0.05
_TO_FOLLOW_SECONDS = 10.0
"""For the other ranks to end once the first one has written what was measured."""
_TO_END_SECONDS = 5.0
_NOT_DONE = 3
"""With which one of several ranks ends whose answer is a failure."""


def main() -> None:
    """Serves, or performs one trial where the arguments name its file."""
    if len(sys.argv) > 2:
        from fasttrain.studies.trial_ranks import Seat

        seat = Seat(*map(int, sys.argv[3:]))
        code = _perform(Path(sys.argv[1]), int(sys.argv[2]), seat)
        if not seat.place.alone:
            # What the ranks are joined by need not be taken apart, and could wait for one that is gone
            os._exit(code)
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


class _Processes:
    """Those of one trial, forked at once. `statuses`: of each rank that has ended, as `waitstatus_to_exitcode` has it."""

    def __init__(self, count: int, become: Callable[[int], None]) -> None:
        self.statuses: dict[int, int] = {}
        self._children: list[int] = []
        for rank in range(count):
            child = os.fork()
            if not child:
                become(rank)
            self._children.append(child)

    def look(self) -> bool:
        """Whether all have ended."""
        for rank, child in enumerate(self._children):
            if rank in self.statuses:
                continue
            found, code = os.waitpid(child, os.WNOHANG)
            if found:
                self.statuses[rank] = os.waitstatus_to_exitcode(code)
        return len(self.statuses) == len(self._children)

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(len(self._children)) if rank not in self.statuses]

    @property
    def failed(self) -> int | None:
        """The first rank that ended in another way than well; None: none yet."""
        return next((rank for rank, status in sorted(self.statuses.items()) if status), None)

    def kill(self) -> None:
        """Each with its workers, where it could not end them itself."""
        for child in self._children:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(child, signal.SIGKILL)


def _served(request: dict[str, Any], lines: _Lines) -> bool:
    """Runs a trial to its end and tells it; False where nobody is there any more who asked for it."""
    from fasttrain.studies.trial_ranks import HERE, Seat

    ranks = int(request.get("ranks", 1))
    door = socket.create_server((HERE, 0)) if ranks > 1 else None
    with door or contextlib.nullcontext():
        meet = (door.getsockname()[1], door.fileno()) if door is not None else ()
        processes = _Processes(ranks, lambda rank: _become_trial(request, Seat(rank, ranks, *meet)))
    began, over_at, ended_by, rank = time.monotonic(), None, None, 0
    answered: dict[int, float] = {}
    while not processes.look():
        now = time.monotonic()
        if over_at is None and processes.statuses.get(0) == 0:
            over_at = now
        line = lines.next(_LOOK_SECONDS)
        if ended_by is None:
            if lines.over or line == b"end":
                ended_by = "asked"
            elif processes.failed is not None:
                ended_by, rank = "rank", processes.failed
            elif ranks > 1 and (stuck := _stuck(request, processes, answered)) is not None:
                ended_by, rank = "rank", stuck
            elif over_at is not None and now - over_at > _TO_FOLLOW_SECONDS:
                ended_by = "first"
            elif now - began > request["limit_seconds"]:
                ended_by = "limit"
        if ended_by is not None:
            processes.kill()
    processes.kill()
    if lines.over:
        return False
    if ended_by is None:
        rank = processes.failed or 0
    ended = {"status": processes.statuses[rank], "by": ended_by, "seconds": time.monotonic() - began, "rank": rank}
    _answer({"ended": ended})
    return True


def _stuck(request: dict[str, Any], processes: _Processes, answered: dict[int, float]) -> int | None:
    """A rank that has written its answer and cannot end: a driver may wait for what its GPU does, and that for another rank."""
    from fasttrain.studies.trial_files import answer_of

    now = time.monotonic()
    for rank in processes.alive:
        if rank not in answered and answer_of(Path(request["task"]), rank).exists():
            answered[rank] = now
        if rank in answered and now - answered[rank] > _TO_END_SECONDS:
            return rank
    return None


def _become_trial(request: dict[str, Any], seat: Seat) -> None:
    code, told = 1, os.dup(1)
    try:
        from fasttrain.studies.trial_files import log_of

        os.setsid()
        # Elsewhere than on Linux the server ends its trials when its own stdin closes
        end_with_parent()
        nothing, log = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(log_of(request["log"], seat.place.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666),
        )
        for here, there in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        # Whatever woke CUDA up in the server, the trial need not fail of it
        if torch.cuda._is_in_bad_fork():
            for descriptor in (told, seat.door):
                if descriptor >= 0:
                    os.set_inheritable(descriptor, True)
            words = [sys.executable, "-m", "fasttrain.studies.trial_server", request["task"], str(told), *seat.words()]
            os.execv(sys.executable, words)
        code = _perform(Path(request["task"]), told, seat)
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


def _perform(path: Path, told: int, seat: Seat) -> int:
    """Performs the trial whose task lies in a file, writes its answer beside it, and returns the process's exit code."""
    from fasttrain.studies.task import Task
    from fasttrain.studies.trial import emitting, perform
    from fasttrain.studies.trial_files import answer_of
    from fasttrain.whole_files import write_json

    task = Task(**json.loads(path.read_text(encoding="utf-8")))
    place = seat.place
    found = perform(task, emitting(told) if place.leads else lambda event: None, seat)
    write_json(answer_of(path, place.rank), found)
    return 0 if place.alone or found["status"] == "done" else _NOT_DONE


if __name__ == "__main__":
    main()
