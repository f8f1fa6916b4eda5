"""Owns how many trials train on the device at once: their turns, and what `--parallel auto` measures while they train."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_WORTH = 1.1
"""Two at once are worth it where they do so many times as much as one."""
_LEAST_LOGS, _LEAST_SECONDS = 3, 4.0
_ROOM = 0.45
"""Of the device's memory that one trial may take for two to fit."""


@dataclass
class _Training:
    """A trial that has the turn: its patches per second since the number of trials beside it changed."""

    since: float
    rates: list[float] = field(default_factory=list)


class Turns:
    """Grants turns in the order in which trials are ready; `told` hears what was measured, in a sentence.

    wanted: so many at once; None: two, as soon and as long as measuring finds that they train more together than one alone.
    changed: told how many train, each time that changes.
    """

    def __init__(
        self,
        wanted: int | None,
        told: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        changed: Callable[[int], None] = lambda training: None,
    ) -> None:
        self.decided = wanted
        self._told = told
        self._now = now
        self._tell_changed = changed
        self._capacity = 1 if wanted is None else wanted
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._training: dict[int, _Training] = {}
        self._alone: float | None = None
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """How many may train at once now."""
        return self._capacity

    @property
    def knows_alone(self) -> bool:
        """Whether nothing is left to be measured of a trial alone on the device."""
        return self.decided is not None or self._alone is not None

    def ready(self, slot: int, go: Callable[[], None]) -> None:
        """A trial has taken its first step; `go` is called when it may train on."""
        with self._lock:
            self._waiting.append((slot, go))
            self._grant()

    def released(self, slot: int) -> None:
        """A trial trains no more, or never came to it; may be said twice."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one[0] != slot]
            if self._training.pop(slot, None) is not None:
                self._changed()
            self._grant()

    def rate(self, slot: int, patches_per_second: float) -> None:
        """What a trial logged of its last steps."""
        with self._lock:
            if slot not in self._training or self.decided is not None:
                return
            self._training[slot].rates.append(patches_per_second)
            self._judge()
            self._grant()

    def does_not_fit(self, text: str) -> None:
        """Memory allows one alone."""
        with self._lock:
            if self.decided is None:
                self.decided = self._capacity = 1
                self._told(text)

    def _grant(self) -> None:
        while self._waiting and len(self._training) < self._capacity:
            slot, go = self._waiting.pop(0)
            self._training[slot] = _Training(self._now())
            self._changed()
            go()

    def _changed(self) -> None:
        for one in self._training.values():
            one.since, one.rates = self._now(), []
        self._tell_changed(len(self._training))

    def _judge(self) -> None:
        steady = [self._steady(one) for one in self._training.values()]
        if len(steady) == 1 and steady[0] is not None and self._alone is None:
            self._alone = steady[0]
            # The next that is ready trains beside it, to be measured
            self._capacity = 2
        elif len(steady) == 2 and self._alone is not None and None not in steady:
            together = sum(one for one in steady if one is not None)
            self.decided = self._capacity = 2 if together >= _WORTH * self._alone else 1
            self._told(
                f"--parallel auto: one trial alone trains {self._alone:.1f} patches/s, two at once {together:.1f} together "
                f"({together / self._alone - 1:+.0%}): {'two at once' if self._capacity == 2 else 'one after another'}"
            )

    def _steady(self, one: _Training) -> float | None:
        """The first log is left out: it may reach back before the change."""
        rates = one.rates[1:]
        if len(rates) < _LEAST_LOGS or self._now() - one.since < _LEAST_SECONDS:
            return None
        return statistics.median(rates)


def fits_beside(gib: float | None, device_gib: float | None) -> bool | None:
    """Whether two trials as large as this one fit into the device's memory; None where that is not known."""
    if gib is None or device_gib is None:
        return None
    return gib <= _ROOM * device_gib
