"""Owns the time of a step's named parts: the host's by the clock, a GPU's by its events, and their names as NVTX ranges."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from fasttrain.ranges import Listener


class PartTimes:
    """Listens to `fasttrain.ranges`. A part's own time is its scope's without that of parts inside it.

    host: {part: seconds} of the thread that made this; beside: the like of other threads, which work at the same time. GPU time
    is taken of the first thread's parts alone.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.host: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._on_gpu = on_gpu
        # A process forked from this one has a thread of the same number, and must not touch the GPU
        self._thread = os.getpid(), threading.get_ident()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """See `ranges.part`."""
        return self._timed(name)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        first_thread = (os.getpid(), threading.get_ident()) == self._thread
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._on_gpu and first_thread else []
        outer = getattr(self._inside, "seconds", 0.0)
        self._inside.seconds = 0.0
        if events:
            events[0].record()
        began = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            if events:
                events[1].record()
                self._events.append((name, events[0], events[1]))
            table = self.host if first_thread else self.beside
            with self._lock:
                table[name] = table.get(name, 0.0) + whole - self._inside.seconds
            self._inside.seconds = outer + whole

    def gpu(self) -> dict[str, float]:
        """{part: seconds} between a part's begin and end on the GPU; waits for it."""
        if not self._events:
            return {}
        torch.cuda.synchronize()
        found: dict[str, float] = {}
        for name, first, last in self._events:
            found[name] = found.get(name, 0.0) + first.elapsed_time(last) / 1000
        return found


def annotating(on_gpu: bool) -> Listener:
    """Shows parts in torch's profiler and, with a GPU, as NVTX ranges of the same names, for Nsight Systems."""

    @contextlib.contextmanager
    def shown(name: str) -> Iterator[None]:
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()

    return shown
