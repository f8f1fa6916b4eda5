"""Owns `tune` beyond the batch size: how cases are kept and fed, and how windows are validated, one setting after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fasttrain.engine.stop import Stopped
from fasttrain.errors import EXIT_MACHINE, EXIT_STORAGE, EXIT_USAGE, FasttrainError
from fasttrain.studies.batch_study import BatchStudy
from fasttrain.studies.measuring import Validation, error_of
from fasttrain.studies.sweep import tolerance_of
from fasttrain.studies.task import Outcome
from fasttrain.telemetry.events import Message

_WAITS = 0.01
"""Of a step's time: where less is waited for data, no worker can gain anything."""
_GAIN = 0.02
_CACHES = "data.cache.kind"
_WORKERS, _PREFETCH = "data.workers", "data.prefetch_factor"
_WINDOWS, _STITCHING = "validation.window.batch_size", "validation.stitching"
_MOST_WINDOWS = 64


@dataclass(frozen=True)
class Tried:
    """One value of a setting as it was measured: patches/s of training, or seconds of a validation of the largest case."""

    setting: str
    value: Any
    rate: float | None = None
    seconds: float | None = None
    wait_share: float | None = None
    reason: str = "ok"
    taken: bool = False


class SettingsStudy:
    """Goes over the settings, each at the best of those before it; `tried` fills as it goes.

    A value is taken where it is better by more than 2%, or by more than rates scatter, so that settings stay as they are where
    nothing is gained.
    """

    def __init__(self, batches: BatchStudy) -> None:
        self.batches = batches
        self.measuring = batches.measuring
        self.options = batches.options
        self.emit = batches.emit
        self.tried: list[Tried] = []
        self.notes: list[str] = []
        self._gain = _GAIN
        self._rate = 0.0
        self._waits = 0.0
        self._workers = 0
        self._planned: dict[Any, int] = {}
        self._last_seconds = 0.0

    def run(self) -> None:
        """After the batch size was chosen and validated. Raises Stopped."""
        chosen = self.batches.chosen
        assert chosen is not None
        self._gain = max(_GAIN, tolerance_of(self.batches.points))
        self._rate, self._waits = chosen.rate, float(chosen.values.get("wait_share") or 0.0)
        self._workers = int(chosen.values["workers"])
        self._caches(str(chosen.values["cache"]))
        self._feeding()
        self._windows()

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"settings_tried": [asdict(one) for one in self.tried], "notes": self.notes}

    def _caches(self, planned: str) -> None:
        recipe = self.batches.resolved.recipe
        kinds: tuple[str, ...] = self.options.caches or ()
        if self.options.caches is None:
            if planned == "gpu":
                kinds = ("memory",)
            elif recipe.data.cache.kind not in ("auto", planned):
                kinds = (planned,)
            else:
                kinds = ("disk",) if planned == "none" else ()
            if not kinds:
                self.notes.append(f"cache: {planned} is the fastest that this machine has room for")
        self._rates(_CACHES, [kind for kind in kinds if kind != planned], planned)

    def _feeding(self) -> None:
        recipe = self._resolved().recipe
        cache = self.batches.settings.get(_CACHES) or (self.batches.chosen and self.batches.chosen.values["cache"])
        if cache == "gpu":
            self.notes.append("workers and prefetch: patches are cut on the GPU")
            return
        if self._waits < _WAITS and self.options.workers is None and self.options.prefetch is None:
            self.notes.append(
                f"workers and prefetch: a step waits {self._waits:.1%} of its time, so that none would gain"
            )
            return
        cpus = max(int(self.measuring.machine["cpus"]) // self.measuring.ranks, 1)
        now = self._workers
        counts = self.options.workers or sorted({0, max(cpus // 2, 1), cpus, 2 * cpus if self.measuring.on_gpu else 1})
        self._rates(_WORKERS, [count for count in counts if count != now], now)
        if self._workers or self.options.prefetch is not None:
            ahead = recipe.data.prefetch_factor
            self._rates(_PREFETCH, [one for one in self.options.prefetch or (2, 4, 8) if one != ahead], ahead)

    def _windows(self) -> None:
        """Windows at a time, doubled while that is faster, and on a GPU the place where they are summed."""
        first = self.batches.validation
        if first is None or first.seconds is None:
            self.notes.append("validation: no case validates")
            return
        own, best = first.window_batch, first.seconds
        self.tried.append(Tried(_WINDOWS, own, seconds=best, reason="as it was"))
        sizes: Iterable[int] = self.options.window_batches or _around(own, _WINDOWS in self.batches.settings)
        worse = 0
        for size in sizes:
            if size == own or (worse and size > own and self.options.window_batches is None):
                continue
            found = self._validation(_WINDOWS, size)
            if found is None:
                return
            seconds = found.seconds
            better = seconds is not None and seconds < best * (1 - self._gain)
            worse += size > own and not better
            if better and seconds is not None:
                best = self._take_validation(found, seconds)
        places = self.options.stitching or (("cpu",) if self.measuring.on_gpu else ())
        current = self._resolved().recipe.validation.stitching
        for place in places:
            if place == current or (place == "gpu" and not self.measuring.on_gpu):
                continue
            found = self._validation(_STITCHING, place)
            if found is None:
                return
            if found.seconds is not None and found.seconds < best * (1 - self._gain):
                best = self._take_validation(found, found.seconds)

    def _take_validation(self, found: Tried, seconds: float) -> float:
        self._take(found)
        former = self.batches.validation
        assert former is not None
        window = self._resolved().recipe.validation.window.batch_size
        self.batches.validation = Validation(
            window, seconds, former.summed_on, former.case, former.reserved_bytes, former.notes
        )
        return seconds

    def _rates(self, setting: str, values: Sequence[Any], now: Any) -> None:
        """Measures training with each value; the fastest that is worth it is taken."""
        if not values:
            return
        self.tried.append(Tried(setting, now, rate=self._rate, wait_share=self._waits, reason="as it was"))
        best: Tried | None = None
        for value in values:
            outcome = self._attempt(setting, value, lambda one, name: self.measuring.steps(one, name))
            if outcome is None:
                return
            rate = outcome.values.get("rate")
            self._planned[value] = (outcome.values.get("plan") or {}).get("workers", 0)
            found = Tried(setting, value, rate, wait_share=outcome.values.get("wait_share"), reason=_how(outcome))
            self._tell(found)
            self.tried.append(found)
            if rate is not None and rate > (
                best.rate if best is not None and best.rate else self._rate * (1 + self._gain)
            ):
                best = found
        if best is not None and best.rate is not None:
            self._take(best)
            self._workers = self._planned[best.value]
            self._rate, self._waits = best.rate, float(best.wait_share or 0.0)

    def _validation(self, setting: str, value: Any) -> Tried | None:
        kept: list[bool] = []

        def validated(one: Any, name: str) -> Outcome:
            outcome, judged = self.measuring.validated(one)
            kept.append(judged.margin_kept)
            return outcome

        outcome = self._attempt(setting, value, validated)
        if outcome is None:
            return None
        seconds = outcome.values.get("validation_seconds")
        reason = _how(outcome)
        if outcome.done and not kept[-1]:
            seconds, reason = None, "leaves less than the margin of memory"
        found = Tried(setting, value, seconds=seconds, reason=reason)
        self._tell(found)
        self.tried.append(found)
        return found

    def _attempt(self, setting: str, value: Any, run: Callable[[Any, str], Outcome]) -> Outcome | None:
        """None where the time is over. A value that cannot be had here is told of; another failure is raised with its log."""
        left = self.measuring.budget_left()
        if left < self._last_seconds:
            self.notes.append(f"{setting}: the time for trials was over before {value}")
            return None
        began = self.measuring.clock()
        try:
            resolved = self.batches.recipe_with({**self.batches.settings, setting: value})
            outcome = run(resolved, f"{setting.rpartition('.')[2]}-{value}")
        except Stopped:
            raise
        except FasttrainError as error:
            if error.exit_code != EXIT_USAGE:
                raise
            outcome = Outcome("failed", faults=error.faults, exit_code=error.exit_code)
        if outcome.status == "failed" and outcome.exit_code not in (EXIT_USAGE, EXIT_MACHINE, EXIT_STORAGE):
            raise error_of(outcome, f"the trial of {setting}={value}")
        self._last_seconds = self.measuring.clock() - began
        return outcome

    def _take(self, found: Tried) -> None:
        self.batches.settings[found.setting] = found.value
        self.tried = [_marked(one, found) for one in self.tried]

    def _resolved(self) -> Any:
        return self.batches.recipe_with(self.batches.settings)

    def _tell(self, found: Tried) -> None:
        figure = f"{found.rate:.1f} patches/s" if found.rate else f"{found.seconds:.2f} s" if found.seconds else ""
        reason = "" if found.reason == "ok" else found.reason
        self.emit(Message(f"{found.setting}={found.value}: {', '.join(filter(None, (figure, reason)))}"))


def _around(own: int, lowered: bool) -> list[int]:
    """Sizes from the own one upwards, then the one below; none above where memory has just lowered it."""
    larger: list[int] = []
    while not lowered and 2 * (larger[-1] if larger else own) <= _MOST_WINDOWS:
        larger.append(2 * (larger[-1] if larger else own))
    return [*larger, *([own // 2] if own > 1 else [])]


def _marked(one: Tried, found: Tried) -> Tried:
    if one.setting != found.setting:
        return one
    return Tried(**{**asdict(one), "taken": one.value == found.value})


def _how(outcome: Outcome) -> str:
    if outcome.done:
        return "ok"
    if outcome.status == "memory":
        return "out of memory" + ("" if outcome.rank is None else f" (rank {outcome.rank})")
    return outcome.faults[0] if outcome.faults else outcome.status
