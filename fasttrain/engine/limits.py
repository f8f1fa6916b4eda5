"""Owns the limits that a user sets to a run (hours, cost, a score), and the account of what it took and will take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_DONE, RecipeError
from fasttrain.recipe.task import TASKS, Task
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.attempts import Attempt
from fasttrain.wording import counted

_HOUR = 3600.0
_SET_BY = ("--max-hours", "--max-cost", "--until-dice")


@dataclass(frozen=True)
class Limits:
    """Where a run is to end though its epochs are not over; it then counts as done, and `stopped_by` says which limit it was.

    max_hours: of this process, from its start; with `hours_of_run`, for a command that is given over and over, of the whole run,
    all its attempts counted. max_cost: USD of the whole run likewise, at `price_per_hour`. until_dice: the validation's headline,
    a mean Dice or a dose score (Gy). whole: those of all folds, where these are of one. Raises RecipeError for a value that can
    be no limit.
    """

    max_hours: float | None = None
    max_cost: float | None = None
    price_per_hour: float | None = None
    until_dice: float | None = None
    hours_of_run: bool = False
    whole: Limits | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name} {value:g}: should be a number above 0"
            for name, value in (
                ("--max-hours", self.max_hours),
                ("--max-cost", self.max_cost),
                ("--price-per-hour", self.price_per_hour),
                ("--until-dice", self.until_dice),
            )
            if value is not None and not (math.isfinite(value) and value > 0)
        ]
        if self.max_cost is not None and self.price_per_hour is None:
            faults.append(
                f"--max-cost {self.max_cost:g} needs --price-per-hour P, what an hour of this machine costs in USD"
            )
        if faults:
            raise RecipeError(faults)

    def of_fold(self) -> Limits:
        """Those of one fold, where hours and money are watched for all."""
        return replace(self, max_hours=None, max_cost=None, whole=self)

    def check_score(self, task: Task) -> None:
        """Raises RecipeError where `until_dice` is a score that no network of the task can have."""
        if self.until_dice is not None and not task.lower_is_better and self.until_dice > 1:
            raise RecipeError(f"--until-dice {self.until_dice:g}: should be above 0 and at most 1, such as 0.9")

    @property
    def options(self) -> str:
        """As on a command line, such as ` --max-cost 10 --price-per-hour 2.5`; empty where nothing is limited."""
        values = zip(
            (*_SET_BY[:2], "--price-per-hour", _SET_BY[2]),
            (self.max_hours, self.max_cost, self.price_per_hour, self.until_dice),
            strict=True,
        )
        return "".join(f" {name} {value:g}" for name, value in values if value is not None)

    def reached_by(self, score: float | None, task: Task) -> str | None:
        """The reason of a stop where the score is as good as was asked for: not below, or not above where lower is better."""
        if self.until_dice is None or score is None or not task.rising(score) >= task.rising(self.until_dice):
            return None
        return f"--until-dice {self.until_dice:g}"


@dataclass(frozen=True)
class Account:
    """What a run has taken over all its attempts: `earlier` ones, and this one since `began` (Unix seconds).

    An earlier attempt whose price nobody told is counted at this one's.
    """

    began: float
    price_per_hour: float | None = None
    earlier: Sequence[Attempt] = ()
    now: Callable[[], float] = time.time

    @property
    def process_hours(self) -> float:
        """Of this attempt."""
        return max(self.now() - self.began, 0.0) / _HOUR

    @property
    def earlier_hours(self) -> float:
        """Of the attempts before it."""
        return sum(attempt.seconds for attempt in self.earlier) / _HOUR

    @property
    def earlier_cost(self) -> float | None:
        """USD of the attempts before it; None where no price is known."""
        price = self.price_per_hour
        if price is None:
            return None
        return sum(attempt.seconds / _HOUR * (attempt.price_per_hour or price) for attempt in self.earlier)

    def hours(self, seconds_left: float = 0.0) -> float:
        """Of all attempts; at the end of the run where `seconds_left` are still to come."""
        return self.earlier_hours + self.process_hours + seconds_left / _HOUR

    def cost(self, seconds_left: float = 0.0) -> float | None:
        """USD of all attempts, likewise; None where no price is known."""
        price, earlier = self.price_per_hour, self.earlier_cost
        if price is None or earlier is None:
            return None
        return earlier + (self.process_hours + seconds_left / _HOUR) * price

    def projected(self, seconds_left: float | None) -> tuple[float | None, float | None]:
        """Hours and USD of all attempts when the last epoch is over; None where no step was measured or no price is known."""
        return (None, None) if seconds_left is None else (self.hours(seconds_left), self.cost(seconds_left))

    def record(self, seconds_left: float | None) -> dict[str, Any]:
        """For `summary.json`: `hours` and `cost` of this process, of the whole run, and projected to its last epoch.

        `cost` is None where no price is known, `projected` where no step was measured.
        """
        hours, cost = self.projected(seconds_left)
        price = self.price_per_hour
        return {
            "attempts": len(self.earlier) + 1,
            "hours": {"process": self.process_hours, "run": self.hours(), "projected": hours},
            "cost": None
            if price is None
            else {
                "price_per_hour": price,
                "process": self.process_hours * price,
                "run": self.cost(),
                "projected": cost,
            },
        }


def ended_by_limit(summary: dict[str, Any]) -> str | None:
    """The limit that a run was ended by, as its summary has it (`--max-hours 2`); None where it was another end."""
    stopped_by = summary.get("stopped_by")
    ended = summary.get("status") == "done" and isinstance(stopped_by, str) and stopped_by.startswith(_SET_BY)
    return str(stopped_by) if ended else None


def is_over(folder: RunFolder, limits: Limits, asked_for: bool) -> bool:
    """Whether there is nothing left of a run: it is finished, no limit given now is wider than the one that ended it
    (`goes_beyond`), and of all folds each is there as it was pooled.
    """
    if not folder.finished() or goes_beyond(limits, folder.read_summary(), asked_for):
        return False
    return not folds_gone(folder) and not _folds_changed(folder)


def _folds_changed(folder: RunFolder) -> bool:
    """Whether a fold went on by itself since its scores were pooled, to its end or not."""
    whole = folder.read_summary()
    folds, cases = whole.get("folds"), whole.get("cases")
    if not isinstance(folds, list) or not isinstance(cases, dict):
        return False
    for told in folds:
        if isinstance(told, dict) and isinstance(told.get("run"), str):
            own = RunFolder(folder.path / told["run"]).read_summary()
            scores = own.get("cases")
            if any(own.get(key) != told.get(key) for key in ("status", "best")):
                return True
            if not isinstance(scores, dict) or any(cases.get(name) != scores[name] for name in scores):
                return True
    return False


def folds_gone(folder: RunFolder) -> list[Path]:
    """The folders of folds that the summary of the whole tells of, and that hold no run any more."""
    folds = folder.read_summary().get("folds")
    names = [fold.get("run") for fold in folds if isinstance(fold, dict)] if isinstance(folds, list) else []
    places = [folder.path / name for name in names if isinstance(name, str)]
    return [path for path in places if not RunFolder(path).holds_a_run()]


def goes_beyond(limits: Limits, summary: dict[str, Any], asked_for: bool) -> bool:
    """Whether a run that a limit ended is to go on, since the limits given now are wider than that one.

    A wider cost or score says so by itself, and so do more hours of the whole run. Hours of one process do only where a person
    `asked_for` the run to go on (`resume RUN`, not `--resume auto`): the same `--max-hours` in a loop would never end.
    """
    ended = ended_by_limit(summary)
    if ended is None:
        return False
    name = ended.split()[0]
    cost, hours = (_figure(summary, part, "run") for part in ("cost", "hours"))
    if name == "--max-hours" and limits.hours_of_run and limits.max_hours is not None:
        return hours is not None and limits.max_hours > hours
    if name == "--max-cost" and limits.max_cost is not None:
        return cost is not None and limits.max_cost > cost
    if name == "--until-dice" and limits.until_dice is not None:
        best = summary.get("best")
        metric = best.get("metric") if isinstance(best, Mapping) else None
        return _judged_by(metric).better(limits.until_dice, _figure(summary, "best", "value"))
    return asked_for and (limits.max_hours is not None or limits.max_cost is not None or limits.until_dice is not None)


def _figure(summary: Mapping[str, Any], part: str, key: str) -> float | None:
    """A number of a summary that anybody may have edited."""
    found = summary.get(part)
    value = found.get(key) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _judged_by(metric: str | None) -> Task:
    """The task whose headline a summary names; segmentation where it names none."""
    return next((task for task in TASKS.values() if metric == f"val_{task.metric}"), TASKS["segmentation"])


def spent_before(limits: Limits, account: Account) -> tuple[str, str] | None:
    """(`--max-cost 10`, a sentence) where the attempts before this one took what the run may cost, or the hours that all of it
    may take; else None.
    """
    cost, attempts = account.cost(), counted(len(account.earlier), "attempt")
    if limits.hours_of_run and limits.max_hours is not None and account.hours() >= limits.max_hours:
        text = f"nothing to do: the run has taken {account.hours():.2f} h in {attempts}; to go on, give a --max-hours above that"
        return f"--max-hours {limits.max_hours:g}", text
    if limits.max_cost is None or cost is None or cost < limits.max_cost:
        return None
    text = f"nothing to do: the run has cost {cost:.2f} USD in {attempts}; to go on, resume it with a --max-cost above that"
    return f"--max-cost {limits.max_cost:g}", text


def told_of_limits(limits: Limits, account: Account) -> str:
    """What the limits bind and what counts towards them, for the start of a run; empty where there is none."""
    parts = []
    attempts = len(account.earlier)
    if limits.max_hours is not None and limits.hours_of_run:
        before = f", {account.earlier_hours:.2f} h of it in {counted(attempts, 'earlier attempt')}" if attempts else ""
        parts.append(f"--max-hours {limits.max_hours:g} of the whole run{before}")
    elif limits.max_hours is not None:
        parts.append(f"--max-hours {limits.max_hours:g}, counted from the start of this process")
    if limits.max_cost is not None:
        before = (
            f", {account.cost():.2f} USD of it spent, {counted(attempts, 'earlier attempt')} counted"
            if attempts
            else ""
        )
        parts.append(f"--max-cost {limits.max_cost:g} USD at {limits.price_per_hour:g} an hour{before}")
    if limits.until_dice is not None:
        parts.append(f"--until-dice {limits.until_dice:g}")
    return f"ends at the latest by {'; or '.join(parts)}" if parts else ""


class LimitTimer:
    """Asks for a stop, from a thread of its own, when the hours or the money are over: in whatever phase the run is then."""

    def __init__(self, limits: Limits, account: Account, stop: StopRequest) -> None:
        seconds, reason = _time_left(limits, account)
        self._timer: threading.Timer | None = None
        if seconds <= threading.TIMEOUT_MAX:
            self._timer = threading.Timer(max(seconds, 0.0), stop.ask, (reason, EXIT_DONE))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """The run is over; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()


def _time_left(limits: Limits, account: Account) -> tuple[float, str]:
    """Seconds until the first of the limits, and its name; infinite where there is none."""
    left = [(math.inf, "")]
    if limits.max_hours is not None:
        hours = account.hours() if limits.hours_of_run else account.process_hours
        left.append(((limits.max_hours - hours) * _HOUR, f"--max-hours {limits.max_hours:g}"))
    cost = account.cost()
    if limits.max_cost is not None and limits.price_per_hour is not None and cost is not None:
        left.append(((limits.max_cost - cost) / limits.price_per_hour * _HOUR, f"--max-cost {limits.max_cost:g}"))
    return min(left)
