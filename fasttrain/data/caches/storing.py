"""Owns what the kinds that keep volumes have in common: the options they are opened with, and what a fill found and tells."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttrain.data.caches.filling import Gathering, Progress
from fasttrain.data.caches.keys import key_of
from fasttrain.data.handed_over import written
from fasttrain.data.inventory import note_use
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError, StorageError
from fasttrain.machine.own_files import make_way
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.samples import Case
from fasttrain.wording import counted, sizes_apart

Told = Callable[[str, str], None]
"""Takes one sentence for the person at the terminal and its level, `info` or `warning` (the fields of a Message)."""

MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """`folder` is where stored volumes lie, `told` hears what a fill found, `epoch` (from 0) is the one that comes first, and
    `ahead` has volumes that were begun already; `ranks` open the same cases.
    """

    folder: Path
    told: Told | None = None
    epoch: int = 0
    ahead: MadeAhead | None = None
    ranks: Ranks = ONLY_ONE

    def making(self, preprocess: Preprocess) -> Callable[[Case], dict[str, Any]]:
        """Gives the record of a case: the one that was made ahead, else one that is made now."""
        ahead = self.ahead
        if ahead is None:
            return preprocess

        def made(case: Case) -> dict[str, Any]:
            record = ahead.record(case, preprocess.training)
            return preprocess(case) if record is None else record

        return made

    def handing(self, preprocess: Preprocess) -> Callable[[Case], int]:
        """The like, giving a descriptor of memory that holds the record."""

        def made(case: Case) -> int:
            memory = None if self.ahead is None else self.ahead.memory(case, preprocess.training)
            return written(preprocess(case)) if memory is None else memory

        return made


class Sizes:
    """What volumes take as they are kept, and what they would with their images in float32."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.float32_bytes = 0

    def add(self, record: dict[str, Any]) -> None:
        """Counts the tensors of a record."""
        lists = [*record["centres"], record["background_centres"]]
        tensors = [tensor for tensor in (record["image"], record["label"], *lists) if tensor is not None]
        kept = sum(tensor.nbytes for tensor in tensors)
        self.kept_bytes += kept
        self.float32_bytes += kept + record["image"].numel() * torch.float32.itemsize - record["image"].nbytes

    def __str__(self) -> str:
        kept = mib_text(self.kept_bytes)
        return kept if self.kept_bytes == self.float32_bytes else f"{kept}; {mib_text(self.float32_bytes)} as float32"


def mib_text(count: int) -> str:
    """`31 MiB`, with a decimal below ten."""
    return f"{count / MIB:.1f} MiB" if count < 10 * MIB else f"{count / MIB:,.0f} MiB"


class Findings:
    """Counts of one fill; threads add to it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._there = 0
        self._sizes = Sizes()
        self._unreadable: list[str] = []
        self._lock = threading.Lock()

    def was_there(self) -> None:
        """A case needed no reading."""
        with self._lock:
            self._there += 1

    def holds(self, record: dict[str, Any]) -> None:
        """The record of a case, whether it was there or was built."""
        with self._lock:
            self._sizes.add(record)

    def was_unreadable(self, text: str) -> None:
        """`text` names an entry and says what is wrong with it."""
        with self._lock:
            self._unreadable.append(text)

    def tell(self, kind: str, where: Path, told: Told | None) -> None:
        """At most one line a level, however much was found."""
        if told is None:
            return
        share = f" ({100 * self._there // self._total}%)" if self._total else ""
        were = "was" if self._total == 1 else "were"
        told(
            f"{kind} cache {where}: {self._there} of {counted(self._total, 'case')} {were} there{share}, {self._sizes}",
            "info",
        )
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
    results = gathering.over(cases, workers)
    gathering.raise_faults()
    return results


def note_opening(folder: Path, cases: Sequence[Case], preprocess: Preprocess, entries: int | None = None) -> None:
    """Says beside what is stored whose it is, for `fasttrain data cache`; `entries` where the files do not show it."""
    files = [str(path.absolute()) for case in cases for path in (*case.images, case.label) if path is not None]
    data = os.path.commonpath([os.path.dirname(path) for path in files]) if files else ""
    part = "training" if preprocess.training else "validation"
    note_use(folder, preprocess.recipe_name, data, part, preprocess.data.storage_dtype, entries)


def make_folder(folder: Path) -> None:
    """Raises StorageError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, 0, error.strerror or str(error)) from error


def make_place(path: Path) -> None:
    """Makes way for a file of the cache; raises StorageError where something else keeps its place."""
    try:
        make_way(path)
    except OSError as error:
        raise StorageError(
            f"{path} is no regular file, in the place of a file of the cache, and cannot be removed "
            f"({error.strerror or error}); remove it by hand, or name another folder with data.cache.folder"
        ) from error


def unwritable(path: Path, needed_bytes: int, reason: str) -> StorageError:
    """The error for a cache that cannot be written, with the space needed and free where space may be the cause."""
    space = ""
    try:
        place = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if needed_bytes:
            needs, left = sizes_apart(needed_bytes, free)
            space = f" (this volume needs {needs}, {left} are free)"
    except (OSError, StopIteration):
        pass
    return StorageError(
        f"the cache {path} cannot be written: {reason}{space}; free some space, name another folder with data.cache.folder "
        "or $FASTTRAIN_CACHE, or set data.cache.kind: none"
    )
