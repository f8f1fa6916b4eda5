"""Owns the account of a start: the seconds from the process's begin to the first optimiser step, by part."""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = ("import", "device", "check", "kernels", "plan", "read", "build", "first_step")
"""In the order in which a run goes through them. `import`: all before the run's own first line, the interpreter too.

`check`: with finding the cases; `kernels`: what is left of their compiling when that is done; `plan`: with what it measures;
`read`: with preprocessing and the copy to the GPU; `first_step`: with what it compiles.
"""


class StartClock:
    """Each second belongs to the part that ends next, so that the parts always add up to the whole."""

    def __init__(self, began: float, now: Callable[[], float] = time.time) -> None:
        """`began` in Unix seconds, as `now` gives them."""
        self._began = self._last = began
        self._now = now
        self._seconds: dict[str, float] = {}

    def ended(self, part: str) -> None:
        """A part of `PARTS` is over, or a stretch of it: several add up. Nothing counts after `first_step`."""
        if part not in PARTS:
            raise ValueError(f"{part} is no part of a start; they are {', '.join(PARTS)}")
        if self.over:
            return
        now = self._now()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def over(self) -> bool:
        """Whether the first step was taken."""
        return "first_step" in self._seconds

    @property
    def total(self) -> float | None:
        """Seconds to the first step; None before it."""
        return self._last - self._began if self.over else None

    @property
    def seconds(self) -> dict[str, float]:
        """Of each part that was met, in order."""
        return {part: self._seconds[part] for part in PARTS if part in self._seconds}
