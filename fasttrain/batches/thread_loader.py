"""Owns worker threads that make items ahead of time and hand them over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory


class ThreadLoader(Iterator[Any]):
    """Items `dataset[key]` for each of `keys`, made by `workers` threads, `prefetch_factor` a thread ahead.

    For datasets whose work leaves the interpreter lock (copies, decoding): nothing is forked and nothing is sent between
    processes. An exception of a thread is raised where its item would have come.
    """

    def __init__(
        self, dataset: Dataset[Any], keys: Iterable[int], workers: int, prefetch_factor: int, pin: bool
    ) -> None:
        self._dataset = dataset
        self._keys = iter(keys)
        self._pin = pin
        # A thread of its own for each item: those of torch would take the cores away from the other workers
        self._pool = ThreadPoolExecutor(workers, "batch-maker", initializer=torch.set_num_threads, initargs=(1,))
        self._coming: deque[Future[Any]] = deque()
        self._most = workers * prefetch_factor
        self._fill()

    def __next__(self) -> Any:
        if not self._coming:
            raise StopIteration
        item = self._coming.popleft().result()
        self._fill()
        return item

    def close(self) -> None:
        """Waits for the items that are being made, and makes no more."""
        self._coming.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while len(self._coming) < self._most:
            try:
                key = next(self._keys)
            except StopIteration:
                return
            self._coming.append(self._pool.submit(self._make, key))

    def _make(self, key: int) -> Any:
        item = self._dataset[key]
        return pin_memory(item) if self._pin else item
