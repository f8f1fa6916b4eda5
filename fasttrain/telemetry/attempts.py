"""Owns what the attempts at a run took, each from the start of its process, as the run's events tell it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_STARTED = '"RunStarted"'
_HOUR = 3600.0
_LEAST_SECONDS, _LEAST_COST = 1.0, 0.005
"""What two records may differ by without that anything was forgotten."""
_LINES_TO_LOOK_BACK = 8
"""For one that can be read, where the last ones of an attempt are damaged."""


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
        return _attempts(file)


def known_attempts(events: Path, summary: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts that either record of a run tells of, its events or its `summary.json`: one of them may have been lost."""
    return with_forgotten(read_attempts(events), summary)


def with_forgotten(attempts: Sequence[Attempt], summary: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts, and before them one for the hours and the cost that a `summary.json` knows of beyond theirs."""
    hours, cost = summary.get("hours"), summary.get("cost")
    seconds = (_number(hours.get("run")) or 0.0) * _HOUR if isinstance(hours, Mapping) else 0.0
    spent, price = (
        (_number(cost.get("run")), _number(cost.get("price_per_hour"))) if isinstance(cost, Mapping) else (None, None)
    )
    return _with_lacking(attempts, seconds, spent, price)


def with_told_at_start(attempts: Sequence[Attempt], started: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts before a `RunStarted`, and before them one for what it tells of beyond theirs: events may be lost since."""
    seconds = _number(started.get("earlier_seconds")) or 0.0
    return _with_lacking(
        attempts, seconds, _number(started.get("earlier_cost")), _number(started.get("price_per_hour"))
    )


def _with_lacking(
    attempts: Sequence[Attempt], seconds: float, cost: float | None, price: float | None
) -> tuple[Attempt, ...]:
    """With what `attempts` fall short of so many seconds, or of so much cost, where one is known."""
    lacking = seconds - sum(attempt.seconds for attempt in attempts)
    known = sum(attempt.seconds / _HOUR * (attempt.price_per_hour or price or 0.0) for attempt in attempts)
    unpaid = 0.0 if cost is None else cost - known
    if lacking < _LEAST_SECONDS and unpaid < _LEAST_COST:
        return tuple(attempts)
    lacking = max(lacking, _LEAST_SECONDS)
    return (Attempt(lacking, max(unpaid, 0.0) / lacking * _HOUR if cost is not None else None), *attempts)


def _number(value: object) -> float | None:
    """One that can be hours or money."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if usable else None  # type: ignore[arg-type]


def former_limits(run: Path) -> str:
    """The options by which the newest attempt at a run was limited (`--max-hours 2`), of all folds those of the whole; empty
    where there were none.
    """
    newest = ""
    for events in (run / "events.jsonl", *sorted(run.glob("fold_*/events.jsonl"))):
        if events.exists():
            with events.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if (
                        _STARTED in line
                        and (record := _record(line)) is not None
                        and record.get("event") == "RunStarted"
                    ):
                        newest = str(record.get("limit_options") or "")
    return newest


def _attempts(lines: Iterable[str]) -> tuple[Attempt, ...]:
    # Of a long run's many lines only those at the edges of an attempt are parsed
    found: tuple[Attempt, ...] = ()
    start: dict[str, Any] | None = None
    last: deque[str] = deque(maxlen=_LINES_TO_LOOK_BACK)
    for line in lines:
        if _STARTED in line and (record := _record(line)) is not None and record.get("event") == "RunStarted":
            found = (*found, *([_attempt(start, last)] if start is not None else []))
            found = with_told_at_start(found, record)
            start = record
            last.clear()
        elif line.endswith("}\n"):
            last.append(line)
    return (*found, *([_attempt(start, last)] if start is not None else []))


def _attempt(start: dict[str, Any], last: Iterable[str]) -> Attempt:
    first = _seconds_of(start)
    began = _number(start.get("began"))
    end = _seconds_of(next((record for line in reversed([*last]) if (record := _record(line)) is not None), start))
    return Attempt(max(end - (first if began is None else began), 0.0), _number(start.get("price_per_hour")) or None)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return record if isinstance(record, dict) and _seconds_of(record) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _seconds_of(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()
