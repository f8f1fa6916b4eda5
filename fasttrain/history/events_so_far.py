"""Owns the reading of an `events.jsonl` that grows: what its events say up to now, each byte read once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fasttrain.telemetry.attempts import Attempt, with_told_at_start

_STEP = b'"event": "StepLogged"'
_PROGRESS = b'"event": "Progress"'
_TIME = re.compile(rb'\{"time": "([^"]+)"')
_WARNINGS_KEPT = 5
_CHUNK = 1 << 22

Record = dict[str, Any]


def number(record: Mapping[str, Any] | None, *keys: str) -> float | None:
    """A finite number out of a document, by the keys that lead to it; None where there is none."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    given = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if given and math.isfinite(value) else None


def text(record: Mapping[str, Any] | None, *keys: str) -> str | None:
    """A text out of a document, likewise."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


class EventsSoFar:
    """What the events of a run say. `update` reads what was added since the last time; a file that became shorter begins anew.

    Lines that are torn or no JSON are passed over, and one that has no end yet waits for it. `started`, `step`, `under_way`,
    `ended`: the newest record of that kind, of the newest attempt alone; `validated`, `epoch`: of the whole run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._half = b""
        self._step_line = self._progress_line = self._last_line = b""
        self.starts = 0
        self.started: Record | None = None
        self.first_step: Record | None = None
        self.epoch: Record | None = None
        self.validated: Record | None = None
        self.checkpoint: Record | None = None
        self.ended: Record | None = None
        self.warnings: list[str] = []
        self.validation_seconds: list[float] = []
        self._over: list[Attempt] = []

    def update(self) -> bool:
        """Reads on; True where there was something new. A file that is not there, or cannot be read, has nothing new."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._begin()
                if size == self._offset:
                    return False
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    *lines, self._half = (self._half + chunk).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:
            return False
        return True

    @property
    def step(self) -> Record | None:
        """The newest figures of training steps."""
        return _parsed(self._step_line)

    @property
    def under_way(self) -> Record | None:
        """The newest report of work outside the steps, where no step was logged since and it is not over."""
        record = _parsed(self._progress_line)
        done, total = number(record, "done"), number(record, "total")
        return record if done is not None and total is not None and done < total else None

    @property
    def last_sign(self) -> float | None:
        """When the newest event was written, in Unix seconds."""
        match = _TIME.match(self._last_line)
        return None if match is None else _seconds(match[1].decode(errors="replace"))

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """What each process took, the last one up to its newest event."""
        return (*self._over, *self._attempt())

    def _take(self, line: bytes) -> None:
        if not line.endswith(b"}"):
            return
        if _STEP in line:
            self._step_line, self._progress_line, self._last_line = line, b"", line
        elif _PROGRESS in line:
            self._progress_line = self._last_line = line
        elif (record := _parsed(line)) is not None:
            self._take_record(record, line)

    def _take_record(self, record: Record, line: bytes) -> None:
        kind = record.get("event")
        if kind == "RunStarted":
            self._over = list(with_told_at_start([*self._over, *self._attempt()], record))
            self.starts += 1
            self.started, self.first_step, self.ended = record, None, None
            self._step_line = self._progress_line = b""
        elif kind == "FirstStep":
            self.first_step = record
        elif kind == "EpochEnded":
            self._take_epoch(record)
        elif kind == "CheckpointSaved":
            self.checkpoint = record
        elif kind == "RunEnded":
            self.ended = record
        elif kind == "Message" and record.get("level") == "warning" and isinstance(record.get("text"), str):
            self.warnings = [*self.warnings, record["text"]][-_WARNINGS_KEPT:]
        self._last_line = line

    def _take_epoch(self, record: Record) -> None:
        self.epoch, self._progress_line = record, b""
        if isinstance(record.get("validation"), dict):
            self.validated = record
            seconds = number(record, "validation", "seconds")
            self.validation_seconds += [seconds] if seconds is not None else []

    def _attempt(self) -> list[Attempt]:
        start, end = _time(self.started), self.last_sign
        if self.started is None or start is None or end is None:
            return []
        began = number(self.started, "began")
        return [Attempt(max(end - (start if began is None else began), 0.0), number(self.started, "price_per_hour"))]


def _parsed(line: bytes) -> Record | None:
    if not line:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and _time(record) is not None else None


def _time(record: Record | None) -> float | None:
    return None if record is None else _seconds(record.get("time"))


def _seconds(moment: Any) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
