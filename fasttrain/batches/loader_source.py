"""Owns batches made on the CPU: in this process or by worker processes, then copied to the device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fasttrain.batches.order import Order
from fasttrain.batches.patch_maker import PatchMaker, RawBatch, as_message
from fasttrain.errors import FasttrainError, MachineError
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, CaseSource

_PR_SET_PDEATHSIG = 1
_TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class LoaderSource:
    """A BatchSource over any CaseSource.

    Workers cut patches; augmentation runs in the worker for a CPU run, where it takes a core of its own, and on the device for
    a GPU run, for the whole batch at once. Both use the same draws.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: CaseSource,
        order: Order,
        device: torch.device,
        workers: int,
        pin_memory: bool,
    ) -> None:
        self.maker = PatchMaker(recipe, source, order)
        self.source = source
        self.device = device
        self.workers = workers
        self.pin_memory = pin_memory and device.type == "cuda"
        self.prefetch_factor = recipe.data.prefetch_factor if workers else None
        self._loader: Any = None

    def batches(self, first_position: int) -> Iterator[Batch]:
        """Batches on the device from a position on, for ever. Errors of a worker's are raised here as they were there."""
        self._stop_workers()
        on_gpu = self.device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            _BatchesByPosition(self.maker, augment=not on_gpu),
            batch_size=None,
            sampler=itertools.count(first_position, self.maker.batch_size),
            num_workers=self.workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            worker_init_fn=_begin_worker if self.workers else None,
            # Without one of its own a loader draws its base seed from torch's generator, and so a resume, which makes a new
            # loader, would shift every dropout after it.
            generator=torch.Generator(),
        )
        # Blocked while workers are forked, so that a signal to the group can't end one that has not yet learnt to ignore it
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
        try:
            self._loader = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        while True:
            message = self._next()
            if isinstance(message, FasttrainError):
                raise message
            raw = RawBatch(**message)
            if on_gpu:
                raw = RawBatch(
                    raw.image.to(self.device, non_blocking=True),
                    raw.label.to(self.device, non_blocking=True),
                    raw.draws,
                    raw.positions,
                    raw.names,
                )
                image, label = self.maker.augment(raw)
            else:
                image, label = raw.image, raw.label
            yield Batch(image, label, tuple(raw.positions), tuple(raw.names))

    def _next(self) -> Any:
        try:
            return next(self._loader)
        except RuntimeError as error:
            known = ended_worker(error, self.workers)
            if known is None:
                raise
            raise known from error

    def close(self) -> None:
        """Ends the workers and gives up the cases."""
        self._stop_workers()
        self.source.close()

    def _stop_workers(self) -> None:
        if self._loader is not None and hasattr(self._loader, "_shutdown_workers"):
            self._loader._shutdown_workers()
        self._loader = None


_OF_WORKERS = ("DataLoader worker", "Pin memory thread exited unexpectedly")


def ended_worker(error: BaseException, workers: int) -> MachineError | None:
    """The error of a worker that was killed, as the user's sentence; None for any other error.

    torch's SIGCHLD handler raises it wherever the trainer is just then, more often in a step than while it waits for a batch.
    """
    if not isinstance(error, RuntimeError) or not any(told in str(error) for told in _OF_WORKERS):
        return None
    return MachineError(
        f"a data loader worker ended: {' '.join(str(error).split())}; if memory is short, lower data.workers "
        f"(now {workers}) or data.prefetch_factor"
    )


class _BatchesByPosition(Dataset[Any]):
    """A map from a batch's first position to its message; what goes wrong in a worker travels as a value.

    The loader would wrap an exception in the text of a traceback, and the one clear sentence would be lost.
    """

    def __init__(self, maker: PatchMaker, augment: bool) -> None:
        self.maker = maker
        self.augment = augment

    def __getitem__(self, first_position: int) -> Any:
        try:
            raw = self.maker.make(first_position)
            if self.augment:
                image, label = self.maker.augment(raw)
                raw = RawBatch(image, label, {}, raw.positions, raw.names)
            return as_message(raw)
        except FasttrainError as error:
            return error


def _begin_worker(_: int) -> None:
    # A signal to the process group is the trainer's to answer: it saves, then ends its workers.
    for number in _TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TRAINERS_SIGNALS)
    _end_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """Asks Linux to kill this worker when the trainer dies, however it dies; elsewhere torch's own watchdog needs seconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
