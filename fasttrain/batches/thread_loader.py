"""Owns worker threads that make items ahead of time and hand them over in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from fasttrain.batches.whereabouts import begin_as

_MOST_SECONDS_TO_END = 60.0


class NothingYet(Exception):  # noqa: N818 - not an error: the one who waits is asked whether to go on
    """No item has come in the time that a loader waits for one; the same item can be asked for again."""


class ThreadLoader(Iterator[Any]):
    """Items `dataset[key]` for each of `keys`, made by `workers` threads, `prefetch_factor` a thread ahead.

    For datasets whose work leaves the interpreter lock (copies, decoding): nothing is forked and nothing is sent between
    processes. An exception of a thread is raised where its item would have come, NothingYet after `wait_seconds` without it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        keys: Iterable[Any],
        workers: int,
        prefetch_factor: int,
        pin: bool,
        wait_seconds: float | None = None,
    ) -> None:
        self._dataset = dataset
        self._keys = iter(keys)
        self._pin = pin
        self._wait_seconds = wait_seconds
        self._todo: SimpleQueue[tuple[int, Future[Any]] | None] = SimpleQueue()
        self._coming: deque[Future[Any]] = deque()
        self._most = workers * prefetch_factor
        # Daemons, since one whose read never ends must not keep the process from ending; `close` waits for all others
        self._threads = [
            Thread(target=self._work, args=(number,), name=f"batch-maker {number + 1}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self._fill()

    def __next__(self) -> Any:
        if not self._coming:
            raise StopIteration
        if not wait([self._coming[0]], self._wait_seconds).done:
            raise NothingYet
        item = self._coming.popleft().result()
        self._fill()
        return item

    @property
    def ready(self) -> bool:
        """Whether the next item need not be waited for."""
        return bool(self._coming) and self._coming[0].done()

    def close(self, most_seconds: float = _MOST_SECONDS_TO_END) -> None:
        """Waits for the items that are being made, `most_seconds` in all, and makes no more."""
        for future in self._coming:
            future.cancel()
        self._coming.clear()
        for _ in self._threads:
            self._todo.put(None)
        deadline = time.monotonic() + most_seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _fill(self) -> None:
        while len(self._coming) < self._most:
            try:
                key = next(self._keys)
            except StopIteration:
                return
            future: Future[Any] = Future()
            self._coming.append(future)
            self._todo.put((key, future))

    def _work(self, number: int) -> None:
        begin_as(number)
        # A thread of its own for each item: those of torch would take the cores away from the other workers
        torch.set_num_threads(1)
        while (task := self._todo.get()) is not None:
            key, future = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                item = self._dataset[key]
                future.set_result(pin_memory(item) if self._pin else item)
            except BaseException as error:
                future.set_exception(error)
            del task, future
