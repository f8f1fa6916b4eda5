"""Owns what the kinds that store volumes have in common: the options they are opened with, and what a fill found and tells."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from fasttrain.data.caches.filling import Gathering, Progress
from fasttrain.data.caches.keys import key_of
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError, StorageError
from fasttrain.samples import Case

Told = Callable[[str, str], None]
"""Takes one sentence for the person at the terminal and its level, `info` or `warning` (the fields of a Message)."""

MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """`folder` is where stored volumes lie, `told` hears what a fill found, `epoch` (from 0) is the one that comes first."""

    folder: Path
    told: Told | None = None
    epoch: int = 0


class Findings:
    """Counts of one fill; threads add to it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._there = 0
        self._unreadable: list[str] = []
        self._lock = threading.Lock()

    def was_there(self) -> None:
        """A case needed no reading."""
        with self._lock:
            self._there += 1

    def was_unreadable(self, text: str) -> None:
        """`text` names an entry and says what is wrong with it."""
        with self._lock:
            self._unreadable.append(text)

    def tell(self, kind: str, where: Path, told: Told | None) -> None:
        """At most one line a level, however much was found."""
        if told is None:
            return
        told(f"{kind} cache {where}: {self._there} of {self._total} cases were there", "info")
        if self._unreadable:
            count, first = len(self._unreadable), min(self._unreadable)
            many = f" and {count - 1} more like it" if count > 1 else ""
            told(f"{first}{many}; built anew from the files", "warning")


def build_record(case: Case, key: str | None, settings: str, preprocess: Preprocess) -> dict[str, Any]:
    """Preprocesses a case for keeping; DataError where its files are not, at the end, the ones that `key` was made from."""
    record = preprocess(case)
    if key is None or key_of(settings, case) != key:
        raise DataError(f"case {case.name}: {case.images[0]} or its label changed while it was read; try again")
    return record


def gather(cases: Sequence[Case], work: Callable[[Case], Any], workers: int, progress: Progress | None) -> list[Any]:
    """What `work` gives for each case, in order; raises one DataError with the faults of all."""
    gathering = Gathering(work, len(cases), progress)
    with gathering.ending_together(), ThreadPool(max(workers, 1)) as pool:
        results = list(pool.imap(gathering, cases))
        # Leaving the pool does not wait for its threads to end, and workers are forked soon after
        pool.close()
        pool.join()
    gathering.raise_faults()
    return results


def make_folder(folder: Path) -> None:
    """Raises StorageError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, 0, error.strerror or str(error)) from error


def unwritable(path: Path, needed_bytes: int, reason: str) -> StorageError:
    """The error for a cache that cannot be written, with the space needed and free where space may be the cause."""
    space = ""
    try:
        place = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if needed_bytes:
            space = f" (this volume needs {needed_bytes / MIB:.1f} MiB, {free / MIB:.1f} MiB are free)"
    except (OSError, StopIteration):
        pass
    return StorageError(
        f"the cache {path} cannot be written: {reason}{space}; free some space, name another folder with data.cache.folder "
        "or $FASTTRAIN_CACHE, or set data.cache.kind: none"
    )
