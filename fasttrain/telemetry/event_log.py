"""Owns `events.jsonl`: every happening of a run as one line of JSON, and how such a file is read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fasttrain.telemetry.events import Event, Progress, as_record
from fasttrain.telemetry.line_file import LineFile
from fasttrain.telemetry.strict_json import dumps


class EventLog:
    """Observer that appends each event to a file of JSON lines with the time (UTC, ISO 8601), flushed one by one.

    Of `Progress` only the first and the last of each piece of work are kept. Numbers that are not finite become null.
    Raises StorageError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._under_way: dict[str, int] = {}

    def on_event(self, event: Event) -> None:
        """Appends the event's line."""
        if isinstance(event, Progress) and not self._is_edge(event):
            return
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._file.append(dumps({"time": time, **as_record(event)}))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()

    def _is_edge(self, event: Progress) -> bool:
        """True for the first and the last report of a piece of work; a count that fell back has begun anew."""
        before = self._under_way.get(event.what)
        if event.done >= event.total:
            self._under_way.pop(event.what, None)
            return True
        self._under_way[event.what] = event.done
        return before is None or event.done < before


def last_events(path: Path, most_bytes: int = 1 << 18) -> list[dict[str, Any]]:
    """The last records of an `events.jsonl` in order, as many as lie whole in its last `most_bytes`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - most_bytes, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [record for line in text.split("\n") if (record := _record_of(line)) is not None]


def _record_of(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records of an `events.jsonl` in order; torn and unreadable lines are skipped, a missing file has none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _record_of(line)
            if record is not None:
                yield record
