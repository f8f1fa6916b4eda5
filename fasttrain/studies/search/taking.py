"""Owns what processes that work on one study do one after another.

SQLite has no lock on a row: two that looked at once both had a trial that waits, or both queued one that had died. The other
storages see to that themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fasttrain.studies.search.storage import BUSY_SECONDS, SQLITE, Place

_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def taking(place: Place, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A scope in which a process takes a trial: of a SQLite study it is in it alone."""
    with contextlib.ExitStack() as held:
        if place.kind == SQLITE and place.path is not None:
            # Never the database itself: closing that would end SQLite's own locks
            held.enter_context(alone(Path(f"{place.path}.taking"), stopped))
        yield


@contextlib.contextmanager
def alone(path: Path, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A scope that one process at a time is in, by a lock on that file; where locks do not work, or another stays too long, it is
    entered anyway.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            stream = held.enter_context(open(path, "ab"))
            began = time.monotonic()
            while not _locked(stream.fileno()) and time.monotonic() - began < BUSY_SECONDS and not stopped():
                time.sleep(_LOOK_SECONDS)
        yield


def _locked(descriptor: int) -> bool:
    """Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
