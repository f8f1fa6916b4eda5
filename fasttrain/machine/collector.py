"""Owns when Python's collector of cyclic garbage rests: while modules are loaded, which leave nothing to collect."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """A scope without collections, for imports; what was made in it is never looked through again.

    Loading torch takes a fifth less time so. A collector that was off before stays off.
    """
    worked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if worked:
            gc.enable()
