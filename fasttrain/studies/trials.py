"""Owns the running of trials from the command line's process: the server's life, time limits, what became of each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_BUG, EXIT_MACHINE, MachineError, StorageError
from fasttrain.machine.limits import oom_kills
from fasttrain.own_process import end_own, start_own
from fasttrain.studies.task import Outcome, Task
from fasttrain.studies.trial_files import answer_of, log_of
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.whole_files import write_json

_LOOK_SECONDS = 0.1
_KILLED = -9


class Trials(Protocol):
    """Runs trials one after another; studies are written against this."""

    def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
        """Runs one to its end, or ends it after so many seconds. Raises Stopped where a stop was asked for."""

    def close(self) -> None:
        """Ends what still runs."""


class TrialServer:
    """Starts the process that trials are forked from, at once. `folder` takes each trial's task, answer and log."""

    def __init__(self, folder: Path, emit: Callable[[Event], None], stop: StopRequest) -> None:
        self.folder = folder
        self._emit = emit
        self._stop = stop
        self._told: set[str] = set()
        self._left = b""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = open(folder / "server.log", "wb")  # noqa: SIM115 - lives as long as the process
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror}; choose another with --run") from error
        self._process = start_own("fasttrain.studies.trial_server", stderr=self._log)
        self._ready = False

    def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
        """See `Trials`; `name` is that of the trial's files."""
        while not self._ready:
            self._ready = "ready" in self._next()
        place, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        write_json(place, task.record())
        answers = [answer_of(place, rank) for rank in range(task.processes)]
        for answer in answers:
            try:
                answer.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(
                    f"{answer} cannot be replaced: {error.strerror}; choose another folder with --run"
                ) from error
        kills, failure = oom_kills(), None
        request = {"task": str(place), "log": str(log), "limit_seconds": limit_seconds, "ranks": task.processes}
        self._send(json.dumps(request))
        while True:
            record = self._next()
            if "ended" in record:
                break
            failure = record.get("failed", failure)
            self._pass_on(record)
        ended = record["ended"]
        found = self._outcome(answers, ended, limit_seconds, kills)
        if failure is not None and found["status"] == "failed":
            found |= failure
        rank, faults = found.get("rank"), tuple(found.get("faults", ()))
        if rank is not None and found["status"] != "memory":
            faults = tuple(f"rank {rank}: {fault}" for fault in faults)
        return Outcome(**{**found, "faults": faults, "log": log_of(str(log), rank or 0)})

    def close(self) -> None:
        """Ends the server and, with it, a trial that still runs."""
        end_own(self._process)
        self._log.close()

    def _outcome(
        self, answers: Sequence[Path], ended: dict[str, Any], limit: float, kills: int | None
    ) -> dict[str, Any]:
        rank, given = int(ended.get("rank", 0)), [_read(answer) for answer in answers]
        short = [one for one, found in enumerate(given) if found.get("status") == "memory"]
        if len(answers) > 1 and short:
            # What others met of it, such as a connection that broke off, is no fault of theirs
            rank = short[0]
        elif ended["by"] == "limit":
            return {"status": "hung", "faults": [f"ended after {limit:g} s"], "seconds": ended["seconds"]}
        found = {**(given[rank] or self._without_answer(ended["status"], kills)), "seconds": ended["seconds"]}
        several = len(answers) > 1 and found["status"] != "done"
        return {**found, "rank": rank} if several else found

    @staticmethod
    def _without_answer(status: int, kills: int | None) -> dict[str, Any]:
        if status == _KILLED and kills is not None and (oom_kills() or 0) > kills:
            text = "the system ended it, since this machine's memory ran out"
            return {"status": "memory", "faults": [text]}
        code = EXIT_BUG if status >= 0 else EXIT_MACHINE
        return {"status": "failed", "faults": [_how_ended(status)], "exit_code": code}

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def _next(self) -> dict[str, Any]:
        """The next record of the server's; a trial is ended and waited for where a stop is asked for."""
        assert self._process.stdout is not None
        while b"\n" not in self._left:
            if self._stop.asked:
                raise Stopped
            if not select.select([self._process.stdout], [], [], _LOOK_SECONDS)[0]:
                continue
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise self._gone()
            self._left += piece
        line, self._left = self._left.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _gone(self) -> MachineError:
        return MachineError(
            f"the process that trials are started from has ended; {self.folder / 'server.log'} may say why"
        )

    def _pass_on(self, record: dict[str, Any]) -> None:
        if "progress" in record:
            self._emit(Progress(**record["progress"]))
        elif "message" in record and record["message"]["text"] not in self._told:
            # Each trial would say it again
            self._told.add(record["message"]["text"])
            self._emit(Message(**record["message"]))


def _read(answer: Path) -> dict[str, Any]:
    """Nothing where a process ended before it wrote it."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    return {}


def _how_ended(status: int) -> str:
    if status >= 0:
        return f"its process ended with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    who = ", as the system does where memory runs out, which `dmesg` would tell" if status == _KILLED else ""
    return f"{name} ended its process{who}"
