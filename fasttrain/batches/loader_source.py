"""Owns batches made on the CPU: in this process, by worker processes or by threads, then copied to the device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from fasttrain.batches.order import Order
from fasttrain.batches.patch_maker import PatchMaker, RawBatch, as_message
from fasttrain.batches.thread_loader import ThreadLoader
from fasttrain.data.caches import SmartCache
from fasttrain.errors import FasttrainError, MachineError
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, CaseSource

_PR_SET_PDEATHSIG = 1
_TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Loading:
    """How batches are made: by `workers` processes or threads (0: by the trainer itself, when it asks), each `prefetch_factor`
    batches ahead, in pinned memory, and copied to the device on a stream of their own.
    """

    workers: int = 0
    kind: Literal["process", "thread"] = "process"
    prefetch_factor: int = 2
    pin_memory: bool = False
    copy_stream: bool = False


class LoaderSource:
    """A BatchSource over any CaseSource.

    Workers cut patches; augmentation runs in the worker for a CPU run, where it takes a core of its own, and on the device for
    a GPU run, for the whole batch at once. Both use the same draws.

    samples_per_epoch: how long an epoch is, for sources that move on with it (SmartCache); workers then last one epoch, since
    they see the window that was open when they began.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: CaseSource,
        order: Order,
        device: torch.device,
        loading: Loading,
        samples_per_epoch: int = 0,
    ) -> None:
        self.maker = PatchMaker(recipe, source, order)
        self.source = source
        self.device = device
        self.loading = loading
        self.samples_per_epoch = samples_per_epoch
        self._on_gpu = device.type == "cuda"
        self._loader: Any = None

    def batches(self, first_position: int) -> Iterator[Batch]:
        """Batches on the device from a position on, for ever. Errors of a worker's are raised here as they were there."""
        raw = map(_unpacked, self._messages(first_position))
        if self._on_gpu:
            copied = (
                _copied_ahead(raw, self.device) if self.loading.copy_stream else (one.to(self.device) for one in raw)
            )
            return map(self._augmented, copied)
        return (Batch(one.image, one.label, tuple(one.positions), tuple(one.names)) for one in raw)

    def _augmented(self, raw: RawBatch) -> Batch:
        image, label = self.maker.augment(raw)
        return Batch(image, label, tuple(raw.positions), tuple(raw.names))

    def _messages(self, first_position: int) -> Iterator[Any]:
        if not isinstance(self.source, SmartCache):
            yield from self._stream(first_position, None)
            return
        position = first_position
        while True:
            epoch = position // self.samples_per_epoch
            end = (epoch + 1) * self.samples_per_epoch
            self._stop_workers()
            self.source.open_epoch(epoch)
            # Only once the workers are there: a thread must not live while they are forked
            yield from self._stream(position, end, functools.partial(self.source.prepare_epoch, epoch + 1))
            position = end

    def _stream(self, first: int, end: int | None, begun: Callable[[], None] = lambda: None) -> Iterator[Any]:
        self._stop_workers()
        size = self.maker.batch_size
        positions: Any = itertools.count(first, size) if end is None else range(first, end, size)
        dataset = _BatchesByPosition(self.maker, augment=not self._on_gpu)
        if self.loading.workers and self.loading.kind == "thread":
            self._loader = ThreadLoader(
                dataset, positions, self.loading.workers, self.loading.prefetch_factor, self._pins
            )
        else:
            self._loader = self._process_loader(dataset, positions)
        begun()
        while True:
            try:
                message = next(self._loader)
            except StopIteration:
                return
            except RuntimeError as error:
                known = ended_worker(error, self.loading.workers)
                if known is None:
                    raise
                raise known from error
            yield message

    def _process_loader(self, dataset: Dataset[Any], positions: Any) -> Iterator[Any]:
        workers = self.loading.workers
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=positions,
            num_workers=workers,
            prefetch_factor=self.loading.prefetch_factor if workers else None,
            pin_memory=self._pins,
            worker_init_fn=_begin_worker if workers else None,
            # Without one of its own a loader draws its base seed from torch's generator, and so a resume, which makes a new
            # loader, would shift every dropout after it.
            generator=torch.Generator(),
        )
        # Blocked while workers are forked, so that a signal to the group can't end one that has not yet learnt to ignore it
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    @property
    def _pins(self) -> bool:
        return self.loading.pin_memory and self._on_gpu

    def close(self) -> None:
        """Ends the workers and gives up the cases."""
        self._stop_workers()
        self.source.close()

    def _stop_workers(self) -> None:
        if isinstance(self._loader, ThreadLoader):
            self._loader.close()
        elif self._loader is not None and hasattr(self._loader, "_shutdown_workers"):
            self._loader._shutdown_workers()
        self._loader = None


def _unpacked(message: Any) -> RawBatch:
    if isinstance(message, FasttrainError):
        raise message
    return RawBatch(**message)


def _copied_ahead(raw: Iterator[RawBatch], device: torch.device) -> Iterator[RawBatch]:
    """Each batch on the device; the next one's copy runs on a stream of its own beside what is done with it."""
    stream = torch.cuda.Stream(device)

    def begin(one: RawBatch) -> tuple[RawBatch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = one.to(device)
            return copied, stream.record_event()

    coming = begin(next(raw))
    while True:
        (copied, done), coming = coming, begin(next(raw))
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        for tensor in copied.tensors():
            # The memory belongs to the copying stream, and must not be used again before this one is done with it
            tensor.record_stream(current)
        yield copied


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
