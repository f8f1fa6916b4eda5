"""Owns the table in which each worker, a process or a thread, leaves word of the case it is at."""

from __future__ import annotations

import mmap
import threading

from fasttrain.samples import CaseSource, Sample

_CELLS = 2
"""Of a worker: the index of its case plus one (0: at none), and how often it has moved."""
_here = threading.local()


class Whereabouts:
    """One row a worker, written by it alone and read by the trainer, so that no lock is held when a worker dies.

    The memory is shared with forked processes and has no name: what a killed worker wrote last can still be read, and nothing is
    left behind. A process that was not forked gets a table of its own, of which the trainer sees nothing.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._cells = memoryview(mmap.mmap(-1, 8 * _CELLS * max(workers, 1))).cast("q")

    def __reduce__(self) -> tuple[type[Whereabouts], tuple[int]]:
        return Whereabouts, (self.workers,)

    def clear(self) -> None:
        """Forgets everything, for the next workers."""
        for cell in range(len(self._cells)):
            self._cells[cell] = 0

    def enter(self, case: int) -> None:
        """The worker that calls it is at a case from now on; nobody else is noted."""
        self._write(case + 1)

    def leave(self) -> None:
        """The worker that calls it is at no case."""
        self._write(0)

    def case_of(self, worker: int) -> int | None:
        """The index of the case that a worker is or was last at; None between two batches."""
        return self._cells[worker * _CELLS] - 1 if self._cells[worker * _CELLS] else None

    def moves(self) -> tuple[int, ...]:
        """How often each worker has moved: as long as this is the same, nothing is done."""
        return tuple(self._cells[1::_CELLS])

    def _write(self, value: int) -> None:
        worker = getattr(_here, "worker", None)
        if worker is not None:
            self._cells[worker * _CELLS] = value
            self._cells[worker * _CELLS + 1] += 1


def begin_as(worker: int) -> None:
    """From now on this thread is a worker of that number; called once by each worker."""
    _here.worker = worker


class NotedCases:
    """A CaseSource that notes who asks for what."""

    def __init__(self, cases: CaseSource, table: Whereabouts) -> None:
        self._cases = cases
        self._table = table

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Sample:
        self._table.enter(index)
        return self._cases[index]

    def close(self) -> None:
        """Gives up the cases."""
        self._cases.close()
