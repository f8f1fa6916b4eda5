"""Owns the order in which batch sizes are measured, and when to stop: doubling, then refinement round the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fasttrain.wording import counted

TOLERANCE = 0.02
"""Of the best rate: so near, a smaller batch is as good."""
_MOST_TOLERANCE = 0.1
_FLAT_STEPS = 2
"""So many doublings in a row that gain less than the tolerance, and the rate no longer rises."""
_REFINEMENTS = 4

OK, MEMORY, HUNG, MARGIN = "ok", "memory", "hung", "margin"
TIME_IS_OVER = "the time for trials is over"


@dataclass(frozen=True)
class Point:
    """A batch size as it was measured.

    status: `ok`; `margin`, where it ran but leaves less of the GPU's memory than is to stay free; `memory`, where that ran out;
    or `hung`. rate in patches/s; spread: half the range of its repeats, as a share. reason: how the trial ended, in a few words.
    """

    batch_size: int
    status: str
    reason: str
    rate: float = 0.0
    spread: float = 0.0
    compiled: bool = False
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it may be chosen."""
        return self.status == OK


@dataclass(frozen=True)
class Bounds:
    """What a sweep may try. start: the recipe's own size. most: patches of one pass over the cases. sizes: those to try and no
    others, None for any that `allowed` lets through. refine: whether sizes between neighbours are tried as well.
    """

    start: int
    most: int
    trials: int
    sizes: tuple[int, ...] | None = None
    allowed: Callable[[int], bool] = lambda size: True
    largest: bool = False
    refine: bool = True
    ranks: int = 1

    @property
    def pass_text(self) -> str:
        """How many patches a pass over the cases has for a batch."""
        each = f" for each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"one pass over the training cases has {counted(self.most, 'patch', 'patches')}{each}"


def record_of(point: Point) -> dict[str, Any]:
    """For JSON."""
    kept = ("repeats", "wait_share", "utilisation", "allocated_bytes", "reserved_bytes", "retries", "epoch_seconds")
    more = ("steps_per_epoch", "host_bytes", "trial_seconds", "cache")
    of_ranks = ("rank", "fullest_rank", "reserved_by_rank")
    return {
        "batch_size": point.batch_size,
        "compiled": point.compiled,
        "status": point.status,
        "reason": point.reason,
        "patches_per_second": point.rate or None,
        "spread": point.spread if point.rate else None,
        **{key: point.values.get(key) for key in (*kept, *more)},
        **{key: point.values[key] for key in of_ranks if point.values.get(key) is not None},
    }


def tolerance_of(points: Sequence[Point]) -> float:
    """How far behind the best counts as equal: 2%, or as much as the best one's repeats scatter, up to 10%."""
    able = [point for point in points if point.ok]
    if not able:
        return TOLERANCE
    return min(max(TOLERANCE, best_of(able).spread), _MOST_TOLERANCE)


def best_of(points: Sequence[Point]) -> Point:
    """The fastest."""
    return max(points, key=lambda point: point.rate)


class Sweep:
    """Measures by `measure`, which gives a Point for a batch size, or None where time is up.

    `points` fill as it goes, and `found` is called, so that what was found until an interruption is there; `ended` says why no
    larger size was tried.
    """

    def __init__(
        self, bounds: Bounds, measure: Callable[[int], Point | None], found: Callable[[], None] = lambda: None
    ) -> None:
        self.bounds = bounds
        self.points: list[Point] = []
        self.ended = ""
        self._measure = measure
        self._found = found
        self._over = False

    def run(self) -> None:
        """Returns when there is nothing left to try."""
        if self.bounds.sizes is not None:
            self._listed(self.bounds.sizes)
            return
        self._upwards()
        self._downwards()
        for _ in range(_REFINEMENTS if self.bounds.refine else 0):
            size = self._between()
            if size is None or self._point(size) is None:
                break

    def at(self, size: int) -> Point | None:
        """The point of a size, where it was measured."""
        return next((point for point in self.points if point.batch_size == size), None)

    def _point(self, size: int) -> Point | None:
        """None where no more trials are to be made."""
        known = self.at(size)
        if known is not None:
            return known
        if self._over:
            return None
        if len(self.points) >= self.bounds.trials:
            self._end(f"{counted(self.bounds.trials, 'trial')} made, as many as asked for")
            return None
        found = self._measure(size)
        if found is None:
            self._end(TIME_IS_OVER)
            return None
        self.points.append(found)
        self._found()
        return found

    def _end(self, why: str) -> None:
        self._over = True
        self.ended = self.ended or why

    def _listed(self, sizes: Sequence[int]) -> None:
        for size in sorted(sizes):
            if size > self.bounds.most:
                self.ended = self._data_text()
                break
            point = self._point(size)
            if point is None:
                break
            if point.status in (MEMORY, HUNG):
                self.ended = self._end_text(point)
                break
        self.ended = self.ended or "all sizes asked for were measured"

    def _upwards(self) -> None:
        size, flat = self._start(), 0
        while True:
            best = self._best_rate()
            point = self._point(size)
            if point is None:
                return
            if not point.ok:
                self.ended = self._end_text(point)
                return
            near = tolerance_of(self.points)
            flat = flat + 1 if best and point.rate < best * (1 + near) else 0
            if not self.bounds.largest:
                if best and point.rate < best * (1 - near):
                    self.ended = f"throughput falls at batch {size}"
                    return
                if flat >= _FLAT_STEPS:
                    self.ended = f"throughput no longer rises at batch {size}"
                    return
            following = self._larger(size)
            if following is None:
                self.ended = self.ended or self._data_text()
                return
            size = following

    def _larger(self, size: int) -> int | None:
        """The next doubling that is allowed; the limit itself where it is more than a half larger."""
        following = 2 * size
        while following <= self.bounds.most:
            if self.bounds.allowed(following):
                return following
            following += size
        last = self.bounds.most
        if following > last >= 1.5 * size and self.bounds.allowed(last):
            return last
        return None

    def _end_text(self, point: Point) -> str:
        return {
            MEMORY: f"memory ends at batch {point.batch_size}",
            MARGIN: f"the margin of memory ends at batch {point.batch_size}",
            HUNG: f"batch {point.batch_size} was ended at its time limit",
        }[point.status]

    def _data_text(self) -> str:
        return self.bounds.pass_text

    def _downwards(self) -> None:
        """Halves while smaller sizes might be as fast, and where nothing fitted yet until something does."""
        size = self._start()
        while size > 1 and not self.bounds.largest:
            size = self._smaller(size)
            point = self._point(size)
            if point is None:
                return
            if point.ok and point.rate < self._best_rate() * (1 - tolerance_of(self.points)):
                return
        while self.bounds.largest and size > 1 and not any(point.ok for point in self.points):
            size = self._smaller(size)
            if self._point(size) is None:
                return

    def _start(self) -> int:
        """The recipe's own size, or the largest one that one pass over the cases has patches for."""
        return self._allowed_to(min(self.bounds.start, self.bounds.most))

    def _smaller(self, size: int) -> int:
        return self._allowed_to(max(size // 2, 1))

    def _allowed_to(self, size: int) -> int:
        return next(less for less in range(size, 0, -1) if less == 1 or self.bounds.allowed(less))

    def _best_rate(self) -> float:
        return max((point.rate for point in self.points if point.ok), default=0.0)

    def _between(self) -> int | None:
        """The next size that might be better than those measured: between the best and its neighbours, or below the smallest that
        is as good as the best.
        """
        able = sorted((point for point in self.points if point.ok), key=lambda point: point.batch_size)
        if not able:
            return None
        best = able[-1] if self.bounds.largest else best_of(able)
        pairs: list[tuple[int | None, int | None]] = [(best.batch_size, self._next(best.batch_size, 1))]
        if not self.bounds.largest:
            near = best.rate * (1 - tolerance_of(self.points))
            chosen = next(point.batch_size for point in able if point.rate >= near)
            pairs = [(self._next(chosen, -1), chosen), (self._next(best.batch_size, -1), best.batch_size), *pairs]
        for low, high in pairs:
            if low is not None and high is not None and (size := self._middle(low, high)) is not None:
                return size
        return None

    def _next(self, size: int, direction: int) -> int | None:
        """The neighbouring size that was measured, however it ended."""
        others = [point.batch_size for point in self.points if (point.batch_size - size) * direction > 0]
        return min(others, key=lambda other: abs(other - size)) if others else None

    def _middle(self, low: int, high: int) -> int | None:
        """The allowed size nearest to the middle, where a step of a quarter is left to make."""
        if high - low < max(2, 0.2 * low):
            return None
        middle = (low + high) // 2
        inside = sorted(range(low + 1, high), key=lambda size: abs(size - middle))
        return next((size for size in inside[: high - low] if self.bounds.allowed(size)), None)
