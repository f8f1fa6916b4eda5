"""Owns threads that load cases while training goes on, are waited for where their work is needed, and are ended with the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from fasttrain.errors import DataError


class Loading:
    """Starts `load` on each index with at most `workers` threads; no index is begun after `cancel`, or once the main thread
    has ended, so that a run that forgot to close does not hang.

    The threads are no daemons: one that is still in native code when the interpreter ends would abort the process.
    """

    def __init__(self, indices: Iterable[int], load: Callable[[int], Any], workers: int) -> None:
        self._todo = list(reversed(list(indices)))
        self._load = load
        self._cancelled = False
        self._loaded: dict[int, Any] = {}
        self._faults: dict[int, tuple[str, ...]] = {}
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        count = min(max(workers, 1), len(self._todo))
        self._threads = [threading.Thread(target=self._work, name=f"loading {n}") for n in range(count)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> dict[int, Any]:
        """Waits for all and gives what was loaded by index; raises one DataError with the faults of all cases, or the first
        failure of another kind. Where Ctrl-C or the like ends the wait, the threads are ended first.
        """
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:
            self.cancel()
            raise
        if self._failure is not None:
            raise self._failure
        if self._faults:
            raise DataError([fault for index in sorted(self._faults) for fault in self._faults[index]])
        return self._loaded

    def cancel(self) -> None:
        """Waits for the cases under way alone, and drops everything."""
        self._cancelled = True
        for thread in self._threads:
            thread.join()
        self._loaded = {}

    def _work(self) -> None:
        while (index := self._next()) is not None:
            try:
                self._loaded[index] = self._load(index)
            except DataError as error:
                self._faults[index] = error.faults
            except BaseException as error:
                self._failure = error

    def _next(self) -> int | None:
        with self._lock:
            ended = self._cancelled or self._failure is not None or not threading.main_thread().is_alive()
            return None if ended or not self._todo else self._todo.pop()
