"""Owns the source that keeps nothing: each volume is read and preprocessed whenever it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.shared import shared_making
from fasttrain.data.caches.storing import Options
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case, Sample


class NoCache:
    """Holds the cases alone; worker processes and threads may share it. making: gives the record of a case, else `preprocess`."""

    def __init__(
        self, cases: Sequence[Case], preprocess: Preprocess, making: Callable[[Case], dict[str, Any]] | None = None
    ) -> None:
        self._cases = tuple(cases)
        self._preprocess = preprocess
        self._making = making or preprocess

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Sample:
        return self._preprocess.as_sample(self._making(self._cases[index]))

    def close(self) -> None:
        """Nothing is held."""


def open_none(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> NoCache:
    """Reads nothing yet: a case that has faults raises its DataError when it is asked for."""
    return NoCache(cases, preprocess, shared_making(options, cases, preprocess))
