"""Owns one pass over all cases with threads: progress, and every faulty case in one error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

from monai.transforms import Transform

from fasttrain.errors import DataError
from fasttrain.samples import Case

Progress = Callable[[int, int], None]
"""Takes (cases done, cases in all)."""


class Gathering(Transform):
    """Runs `work` on a case and keeps what it raises, so that the pass goes on to the other cases."""

    def __init__(self, work: Callable[[Case], Any], total: int, progress: Progress | None) -> None:
        self.work = work
        self.total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._faults: dict[str, tuple[str, ...]] = {}
        self._failure: Exception | None = None

    def __call__(self, case: Case) -> Any:
        """What `work` returns, None for a faulty case or once something else than a data fault has come up."""
        result = None
        if self._failure is None:
            try:
                result = self.work(case)
            except DataError as error:
                self._faults[case.name] = error.faults
            except Exception as error:
                self._failure = error
        with self._lock:
            self._done += 1
            if self._progress is not None and self._failure is None:
                try:
                    self._progress(self._done, self.total)
                except Exception as error:  # the listener asks for an end; MONAI would wrap it in an error of its own
                    self._failure = error
        return result

    def raise_faults(self) -> None:
        """Raises the first failure that is no data fault as it is, else one DataError with all faults by case name."""
        if self._failure is not None:
            raise self._failure
        if self._faults:
            raise DataError([fault for name in sorted(self._faults) for fault in self._faults[name]])


def check_all(work: Callable[[Case], None], cases: Sequence[Case], workers: int, progress: Progress | None) -> None:
    """Runs `work` on every case with `workers` threads and keeps nothing; raises one DataError with all faults.

    Ctrl-C breaks the pass off: the threads are daemons, and what they have begun ends with the process.
    """
    gathering = Gathering(work, len(cases), progress)
    with ThreadPool(max(workers, 1)) as pool:
        for _ in pool.imap_unordered(gathering, cases):
            pass
    gathering.raise_faults()
