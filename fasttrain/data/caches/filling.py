"""Owns one pass over all cases with threads: progress, and every faulty case in one error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fasttrain.errors import DataError

Progress = Callable[[int, int], None]
"""Takes (cases done, cases in all)."""

_MOST_SECONDS_TO_END = 30.0


class Named(Protocol):
    """What is told of a case that has faults."""

    @property
    def name(self) -> str: ...


class Gathering:
    """Runs `work` on a case and keeps what it raises, so that the pass goes on to the other cases."""

    def __init__(self, work: Callable[[Any], Any], total: int, progress: Progress | None) -> None:
        self.work = work
        self.total = total
        self._progress = progress
        self._done = 0
        self._changed = threading.Condition()
        self._under_way = 0
        self._faults: dict[str, tuple[str, ...]] = {}
        self._failure: BaseException | None = None

    def __call__(self, case: Named) -> Any:
        """What `work` returns, None for a faulty case or once something else than a data fault has come up."""
        with self._changed:
            self._under_way += 1
        try:
            return self._run(case)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """A scope for the pass. Where Ctrl-C or the like leaves it, cases not yet begun are passed over and those under way
        are waited for: a thread that is still in native code when the interpreter ends aborts the process.
        """
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.wait_for(lambda: self._under_way == 0, timeout=_MOST_SECONDS_TO_END)
            raise

    def over(self, cases: Sequence[Named], workers: int) -> list[Any]:
        """What `work` returns for each of `cases`, in order, by `workers` threads, all of which have ended then.

        multiprocessing's ThreadPool would need a lock in /dev/shm, which may take none, and an executor's threads would keep the
        process from ending where a read has no end.
        """
        results: list[Any] = [None] * len(cases)
        todo, taking = iter(enumerate(cases)), threading.Lock()

        def run() -> None:
            while True:
                with taking:
                    taken = next(todo, None)
                if taken is None:
                    return
                results[taken[0]] = self(taken[1])

        threads = [
            threading.Thread(target=run, name=f"filling {number}", daemon=True)
            for number in range(max(1, min(workers, len(cases))))
        ]
        with self.ending_together():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def _run(self, case: Named) -> Any:
        result = None
        if self._failure is None:
            try:
                result = self.work(case)
            except DataError as error:
                self._faults[case.name] = error.faults
            except Exception as error:
                self._failure = error
        with self._changed:
            self._done += 1
            if self._progress is not None and self._failure is None:
                try:
                    self._progress(self._done, self.total)
                except Exception as error:  # the listener asks for an end, which is raised where the pass was begun
                    self._failure = error
        return result

    def raise_faults(self) -> None:
        """Raises the first failure that is no data fault as it is, else one DataError with all faults by case name."""
        if self._failure is not None:
            raise self._failure
        if self._faults:
            raise DataError([fault for name in sorted(self._faults) for fault in self._faults[name]])
