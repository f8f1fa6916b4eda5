"""Owns the source that keeps every preprocessed volume in memory (in place of MONAI's CacheDataset).

MONAI's class fills by multiprocessing's ThreadPool, whose lock lies in /dev/shm and cannot be had where that takes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.shared import shared_making
from fasttrain.data.caches.storing import Options, Sizes, gather
from fasttrain.data.caches.together import can_make_together, make_together
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case, Sample
from fasttrain.wording import counted


class MemoryCache:
    """The records are never written to, so forked workers share their pages."""

    def __init__(self, records: list[dict[str, Any]], preprocess: Preprocess) -> None:
        self._records = records
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        return self._preprocess.as_sample(self._records[index])

    def close(self) -> None:
        """Gives the volumes back to the system."""
        self._records = []


def open_memory(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> MemoryCache:
    """Preprocesses every case with `workers` threads, its share of them where several ranks of a machine do; raises one DataError
    with the faults of all.
    """
    records: list[dict[str, Any]] = [{}] * len(cases)
    if can_make_together(options.ranks, options.told):
        make_together(cases, preprocess, records.__setitem__, workers, progress, options)
    else:
        records = gather(cases, shared_making(options, cases, preprocess), workers, progress)
    if options.told is not None:
        sizes = Sizes()
        for record in records:
            sizes.add(record)
        options.told(f"memory cache: {counted(len(cases), 'case')}, {sizes}", "info")
    return MemoryCache(records, preprocess)
