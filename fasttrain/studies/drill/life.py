"""Owns one life of a run in a drill: its process, what it tells through its event log, and its end, by itself or by SIGKILL."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.errors import EXIT_STORAGE, FasttrainError, StorageError
from fasttrain.own_process import start_own

_LOOK_SECONDS = 0.002


class EventTail:
    """Follows an `events.jsonl` that another process writes, from where it ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._left = b""

    def new(self) -> list[dict[str, Any]]:
        """The records that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                piece = file.read()
        except OSError:
            return []
        self._offset += len(piece)
        *lines, self._left = (self._left + piece).split(b"\n")
        found = []
        for line in lines:
            # One that a killed process left torn
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [record for record in found if isinstance(record, dict)]


class Life:
    """A process that trains or resumes a run of the drill, with what it has told so far.

    step: the last one that it logged; times: when each was, on this process's clock; first_step_seconds: from its start to its
    first step, plan_seconds of them to decide; resumed_step: where it went on, once it has started (None: it began). check:
    called while it is waited for, to raise where nobody should wait any more.
    """

    def __init__(self, run: Path, task: dict[str, Any], check: Callable[[], None]) -> None:
        self.run = run
        self.step = 0
        self.times: dict[int, float] = {}
        self.started = False
        self.resumed_step: int | None = None
        self.first_step_seconds: float | None = None
        self.plan_seconds = 0.0
        self.validating = False
        self.saves: list[dict[str, Any]] = []
        self._steps_per_epoch = 0
        self._check = check
        self._tail = EventTail(run / "events.jsonl")
        self._log_path = run.parent / f"{run.name}.log"
        self._log = open(self._log_path, "ab")  # noqa: SIM115 - the process writes into it
        self._process = start_own("fasttrain.studies.drill.process", stderr=self._log)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()

    def look(self) -> bool:
        """Takes in what was told since; False once the process has ended. Raises what `check` raises."""
        self._check()
        ended = self._process.poll() is not None
        for record in self._tail.new():
            self._take(record)
        if not ended:
            time.sleep(_LOOK_SECONDS)
        return not ended

    def until(self, holds: Callable[[Life], bool], most_seconds: float = math.inf) -> None:
        """Waits until something holds, the process has ended, or the time is over."""
        deadline = time.monotonic() + most_seconds
        while self.look() and not holds(self) and time.monotonic() < deadline:
            pass

    def wait(self, seconds: float) -> None:
        """Looks on for so long, or until the process ends."""
        self.until(lambda life: False, seconds)

    @property
    def trained_seconds(self) -> float:
        """From the first step that was logged to the last."""
        return max(self.times.values()) - min(self.times.values()) if self.times else 0.0

    def kill(self) -> float:
        """SIGKILL to the process, as a system that is out of memory does it, and to what it leaves behind; the time of it."""
        at = time.monotonic()
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        self.close()
        for record in self._tail.new():
            self._take(record)
        return at

    def finish(self) -> None:
        """Raises the error that the process ended with, where it was one."""
        self.close()
        if self._process.returncode:
            raise _as_error(self._process.returncode, self._log_path)

    @property
    def code(self) -> int | None:
        """What the process ended with; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Ends the process and its workers; may be called twice."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self._log.close()

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("event")
        if kind == "RunStarted":
            self.started, self.resumed_step, self._steps_per_epoch = (
                True,
                record["resumed_step"],
                record["steps_per_epoch"],
            )
        elif kind == "FirstStep":
            self.first_step_seconds, self.plan_seconds = record["seconds"], record["parts"].get("plan", 0.0)
        elif kind == "StepLogged":
            self.step = record["step"]
            self.times[self.step] = time.monotonic()
            # From an epoch's last step to its row
            self.validating = record["step_in_epoch"] == self._steps_per_epoch
        elif kind == "EpochEnded":
            self.validating = False
        elif kind == "CheckpointSaved":
            self.saves.append(record)


def _as_error(code: int, log: Path) -> FasttrainError:
    """The sentences that a process wrote last, as an error with its exit code."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    prefix = "fasttrain: "
    faults = (
        [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] or lines[-1:] or [f"exit code {code}"]
    )
    error = StorageError([f"the drill's run failed: {fault}" for fault in faults])
    error.exit_code = code if 0 < code < 128 else EXIT_STORAGE
    return error
