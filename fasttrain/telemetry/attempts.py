"""Owns what the attempts at a run took, each from the start of its process, as the run's events tell it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_STARTED = '"RunStarted"'


@dataclass(frozen=True)
class Attempt:
    """One process's work on a run: wall-clock seconds, and what an hour of it cost where the user said so."""

    seconds: float
    price_per_hour: float | None = None


def read_attempts(events: Path) -> tuple[Attempt, ...]:
    """The attempts that an `events.jsonl` tells of, oldest first; none where there is no such file.

    An attempt that was killed ends with its last event. Torn and unreadable lines are skipped.
    """
    if not events.exists():
        return ()
    with events.open(encoding="utf-8", errors="replace") as file:
        return tuple(_attempts(file))


def former_limits(run: Path) -> str:
    """The options by which the newest attempt at a run was limited (`--max-hours 2`), of all folds those of the whole; empty
    where there were none.
    """
    newest = ""
    for events in (run / "events.jsonl", *sorted(run.glob("fold_*/events.jsonl"))):
        if events.exists():
            with events.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if _STARTED in line and (record := _record(line)) is not None and record.get("event") == "RunStarted":
                        newest = str(record.get("limit_options") or "")
    return newest


def _attempts(lines: Iterable[str]) -> Iterable[Attempt]:
    # Of a long run's many lines only those at the edges of an attempt are parsed
    start: dict[str, Any] | None = None
    last = ""
    for line in lines:
        if _STARTED in line and (record := _record(line)) is not None and record.get("event") == "RunStarted":
            if start is not None:
                yield _attempt(start, last)
            start, last = record, line
        elif line.endswith("}\n"):
            last = line
    if start is not None:
        yield _attempt(start, last)


def _attempt(start: dict[str, Any], last: str) -> Attempt:
    first = _seconds_of(start)
    began, price = start.get("began"), start.get("price_per_hour")
    end = _seconds_of(_record(last) or start)
    seconds = end - (began if isinstance(began, int | float) else first)
    return Attempt(max(seconds, 0.0), float(price) if isinstance(price, int | float) else None)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return record if isinstance(record, dict) and _seconds_of(record) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _seconds_of(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()
