"""Owns where preprocessed volumes are kept: one kind a file, by the `kind` of `data.cache`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fasttrain.data.caches.estimate import estimate_bytes
from fasttrain.data.caches.filling import Progress, check_cases
from fasttrain.data.caches.memory import open_memory
from fasttrain.data.caches.none import open_none
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case, CaseSource

CACHES: dict[str, Callable[[Sequence[Case], Preprocess, int, Progress | None], CaseSource]] = {
    "none": open_none,
    "memory": open_memory,
}

__all__ = ["CACHES", "Progress", "check_cases", "estimate_bytes", "open_case_source"]


def open_case_source(
    kind: str, cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None = None
) -> CaseSource:
    """Opens the cache `kind` (a key of `CACHES`; the plan resolves `auto`) over `cases`.

    Every case has been read and checked when it returns; otherwise one DataError lists the faults of all. `workers` threads
    do it, and `progress` is told (done, total) from them, one call at a time.
    """
    return CACHES[kind](cases, preprocess, workers, progress)
