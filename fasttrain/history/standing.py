"""Owns how a run stands, read from its folder while it runs, and after it ended or was killed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.errors import StorageError
from fasttrain.history.events_so_far import EventsSoFar, Record, number, text
from fasttrain.history.holder import Holder, is_held, named_holder
from fasttrain.recipe.task import TASKS
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.attempts import Attempt
from fasttrain.telemetry.metrics_csv import Row, read_metrics

RUNNING, KILLED, UNSEEN, NOT_BEGUN = "running", "killed", "unseen", "not begun"
"""Beside `done`, `stopped` and `failed`, which are how a summary puts it. unseen: in the hands of another machine, whose lock
cannot be seen from here; not begun: cut short before it held a run."""
_HOUR = 3600.0
ENDED = frozenset({"done", "stopped", "failed"})


@dataclass(frozen=True)
class Standing:
    """Everything that a run's files tell about it now. None: not known, or there is none.

    `told` is `status` as a sentence. Times are Unix seconds, `hours` and `cost` (USD) those of all attempts; `faults` are the
    files that could not be read. `best` is metric, value, epoch. `rows` are those of metrics.csv.
    """

    path: Path
    status: str
    told: str
    recipe: str | None
    device: str | None
    gpu_uuid: str | None
    on_gpu: bool
    visible_devices: str | None
    host: str | None
    holder: Holder | None
    began: float | None
    last_sign: float | None
    started: Record | None
    step: Record | None
    epoch: Record | None
    validated: Record | None
    under_way: Record | None
    checkpoint: Record | None
    first_step_taken: bool
    summary: Record
    plan: Record
    environment: Record
    rows: list[Row]
    best: tuple[str, float, int] | None
    attempts: int
    hours: float | None
    cost: float | None
    price_per_hour: float | None
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether a process is at work on it."""
        return self.status == RUNNING

    @property
    def epochs_done(self) -> int:
        """Closed epochs."""
        return max((int(row["epoch"] or 0) for row in self.rows), default=0)

    @property
    def metric(self) -> str | None:
        """The column that judges the run."""
        return _metric(self.rows)


class RunReader:
    """Reads one run again and again; what did not change is not read twice."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.folder = RunFolder(path)
        self._now = now
        self._events = EventsSoFar(self.folder.events)
        self._documents: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    def read(self) -> Standing:
        """How the run stands now. Never raises for what lies in the folder: what cannot be read is among the `faults`."""
        folder, events = self.folder, self._events
        faults: list[str] = []
        # Before the files: a run that ends in between is then seen as running, and as ended the next time
        held = is_held(folder)
        events.update()
        summary, environment, plan = (
            self._document(path, faults) for path in (folder.summary, folder.environment, folder.plan)
        )
        rows = self._rows(faults)
        faults += _gone(folder)
        holder = named_holder(folder)
        status = self._status(summary, holder, held)
        hours, cost, price = self._taken(status, summary)
        hardware = environment.get("hardware") if isinstance(environment.get("hardware"), dict) else {}
        return Standing(
            path=folder.path,
            status=status,
            told=self._told(status, summary, holder),
            recipe=text(events.started, "recipe") or text(plan, "recipe", "name") or _named(folder.path),
            device=text(hardware, "device_name") or text(events.started, "device"),
            gpu_uuid=text(hardware, "gpu_uuid"),
            on_gpu=(text(hardware, "device") or "").startswith("cuda"),
            visible_devices=text(environment, "variables", "CUDA_VISIBLE_DEVICES"),
            host=text(environment, "host"),
            holder=holder,
            began=folder.began(),
            last_sign=events.last_sign,
            started=events.started,
            step=events.step,
            epoch=events.epoch,
            validated=events.validated,
            under_way=events.under_way,
            checkpoint=events.checkpoint,
            first_step_taken=events.first_step is not None,
            summary=summary,
            plan=plan,
            environment=environment,
            rows=rows,
            best=_best(rows, summary),
            attempts=events.starts,
            hours=hours,
            cost=cost,
            price_per_hour=price,
            warnings=list(events.warnings),
            faults=faults,
        )

    def read_start(self) -> tuple[Record, Record]:
        """`environment.json` and `plan.json` alone; empty where they cannot be read."""
        folder, faults = self.folder, list[str]()
        return self._document(folder.environment, faults), self._document(folder.plan, faults)

    @property
    def seconds_to_first_step(self) -> float | None:
        """Of the newest attempt, as far as the events were read."""
        return number(self._events.first_step, "seconds")

    @property
    def validation_seconds(self) -> list[float]:
        """Of each validation that the events tell of, as far as they were read."""
        return list(self._events.validation_seconds)

    def _status(self, summary: Record, holder: Holder | None, held: bool) -> str:
        events, status = self._events, text(summary, "status")
        # The summary of an earlier attempt says nothing about one that was begun since
        of_last = status in ENDED and (number(summary, "attempts") or 0) >= events.starts
        if held:
            return RUNNING
        if of_last and status is not None:
            return status
        if (ended := text(events.ended, "status")) in ENDED and ended is not None:
            return ended
        if self.folder.claimed_here():
            return RUNNING
        if not self.folder.holds_a_run() and events.started is None and not self.folder.has_checkpoints():
            return NOT_BEGUN
        return UNSEEN if holder is not None and not holder.here else KILLED

    def _told(self, status: str, summary: Record, holder: Holder | None) -> str:
        if status == RUNNING:
            ending = self._events.ended is not None
            return f"running, {holder or 'its process'} is alive" + (", at its end or being resumed" if ending else "")
        if status == KILLED:
            process = f"{holder} is gone" if holder is not None else "no process has it"
            return f"killed: {process} and left no word of how it ended"
        if status == UNSEEN:
            return f"in the hands of {holder} when last heard of; from here it cannot be seen whether that lives"
        if status == NOT_BEGUN:
            return "not begun: cut short before its first step"
        source = summary if text(summary, "status") == status else self._events.ended or {}
        by, code, error = text(source, "stopped_by"), number(source, "exit_code"), text(source, "error")
        told = {"done": "ended, done", "stopped": "ended, stopped", "failed": "ended, failed"}[status]
        told += f" by {by}" if by else ""
        told += f" (exit code {code:.0f})" if code else ""
        return f"{told}: {error.splitlines()[0]}" if error and error.strip() else told

    def _taken(self, status: str, summary: Record) -> tuple[float | None, float | None, float | None]:
        """Hours and cost of all attempts, and the price of the last one."""
        attempts = list(self._events.attempts)
        price = attempts[-1].price_per_hour if attempts else None
        if status in ENDED and (hours := number(summary, "hours", "run")) is not None:
            return hours, number(summary, "cost", "run"), number(summary, "cost", "price_per_hour")
        if not attempts:
            return None, None, None
        if status == RUNNING and self._events.ended is None and self._events.last_sign is not None:
            last = attempts.pop()
            attempts.append(Attempt(last.seconds + max(self._now() - self._events.last_sign, 0.0), price))
        hours = sum(attempt.seconds for attempt in attempts) / _HOUR
        # As the run reckons it: one whose price nobody told is counted at the last one's
        costs = [attempt.seconds / _HOUR * (attempt.price_per_hour or price or 0.0) for attempt in attempts]
        return hours, sum(costs) if price is not None else None, price

    def _document(self, path: Path, faults: list[str]) -> Record:
        found = self._once(path, lambda: json.loads(path.read_text(encoding="utf-8")), faults)
        if found is None or isinstance(found, dict):
            return found or {}
        faults.append(f"{path.name} is damaged: it is no JSON object")
        return {}

    def _rows(self, faults: list[str]) -> list[Row]:
        rows: list[Row] = self._once(self.folder.metrics, lambda: read_metrics(self.folder.metrics), faults) or []
        whole = [row for row in rows if math.isfinite(row.get("epoch") or math.nan)]
        if len(whole) < len(rows):
            faults.append(f"{self.folder.metrics.name} is damaged: it has rows without an epoch")
        return whole

    def _once(self, path: Path, read: Callable[[], Any], faults: list[str]) -> Any:
        """What a file held when it was last changed; None where it is not there or cannot be read, which is then a fault."""
        try:
            found = path.stat()
            key = (found.st_ino, found.st_size, found.st_mtime_ns)
            if path not in self._documents or self._documents[path][0] != key:
                self._documents[path] = (key, read())
            return self._documents[path][1]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            faults.append(f"{path.name} cannot be read: {error.strerror or error}")
        except StorageError as error:
            faults.append(str(error))
        except (ValueError, RecursionError):
            faults.append(f"{path.name} is damaged: it is no JSON document")
        return None


def _gone(folder: RunFolder) -> list[str]:
    """What a run that was begun cannot be without."""
    if folder.holds_a_run():
        needed = [] if folder.folds.exists() else [folder.environment, folder.plan]
        return [f"{path.name} is missing" for path in needed if not path.exists()]
    begun = folder.has_checkpoints() or folder.metrics.exists() or folder.events.exists() or folder.summary.exists()
    return [f"{folder.recipe.name} is missing"] if begun else []


def _named(path: Path) -> str | None:
    """The recipe's name out of `NAME-TIMESTAMP`, where nothing else has it."""
    parts = path.name.split("-")
    stamp = next((i for i, part in enumerate(parts) if i and len(part) == 8 and part.isdecimal()), None)
    return "-".join(parts[:stamp]) if stamp else None


def _metric(rows: list[Row]) -> str | None:
    return next((f"val_{task.metric}" for task in TASKS.values() if rows and f"val_{task.metric}" in rows[0]), None)


def _best(rows: list[Row], summary: Record) -> tuple[str, float, int] | None:
    """By the rows, which a resume takes back where it must; by the summary where there are none."""
    metric = _metric(rows)
    task = next((task for task in TASKS.values() if metric == f"val_{task.metric}"), None)
    best: tuple[str, float, int] | None = None
    if metric is not None and task is not None:
        for row in rows:
            value, epoch = row.get(metric), row["epoch"]
            known = value is not None and math.isfinite(value)
            if known and task.better(value or 0.0, None if best is None else best[1]):
                best = (metric, value or 0.0, int(epoch or 0))
    value = number(summary, "best", "value")
    if best is None and value is not None:
        return text(summary, "best", "metric") or "score", value, int(number(summary, "best", "epoch") or 0)
    return best
