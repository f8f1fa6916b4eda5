"""Owns batches made on the CPU: in this process, by worker processes or by threads, then copied to the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from fasttrain.batches.order import Order, turns
from fasttrain.batches.patch_maker import PatchMaker, RawBatch, as_message, from_message
from fasttrain.batches.process_loader import ProcessLoader, shared
from fasttrain.batches.thread_loader import NothingYet, ThreadLoader
from fasttrain.batches.whereabouts import NotedCases, Whereabouts
from fasttrain.batches.worker_watch import LOOK_SECONDS, MOST_SECONDS_WITHOUT_A_MOVE, WorkerWatch, ended_worker
from fasttrain.data.caches import SmartCache
from fasttrain.errors import FasttrainError, MachineError
from fasttrain.machine.place import ALONE, Place
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, CaseSource

_SECONDS_FOR_A_HUNG_THREAD = 1.0


@dataclass(frozen=True)
class Loading:
    """How batches are made: by `workers` processes or threads (0: by the trainer itself, when it asks), each `prefetch_factor`
    batches ahead, in pinned memory, and copied to the device on a stream of their own. Workers that do nothing for `most_seconds`
    while a batch is waited for end the run.
    """

    workers: int = 0
    kind: Literal["process", "thread"] = "process"
    prefetch_factor: int = 2
    pin_memory: bool = False
    copy_stream: bool = False
    most_seconds: float = MOST_SECONDS_WITHOUT_A_MOVE


class LoaderSource:
    """A BatchSource over any CaseSource.

    Workers cut patches; augmentation runs in the worker for a CPU run, where it takes a core of its own, and on the device for
    a GPU run, for the whole batch at once. Both use the same draws.

    samples_per_epoch: how long an epoch is, for sources that move on with it (SmartCache); workers then last one epoch, since
    they see the window that was open when they began. case_names: by index, for sentences about workers. told: hears a sentence
    and its level. place: of several ranks each makes the batches whose turn it is.
    """

    waited_for = True

    def __init__(
        self,
        recipe: Recipe,
        source: CaseSource,
        order: Order,
        device: torch.device,
        loading: Loading,
        samples_per_epoch: int = 0,
        case_names: Sequence[str] = (),
        told: Callable[[str, str], None] | None = None,
        place: Place = ALONE,
    ) -> None:
        self.place = place
        self._table = Whereabouts(loading.workers)
        self._watch = WorkerWatch(self._table, case_names, loading.most_seconds)
        self._told = told
        self.maker = PatchMaker(recipe, NotedCases(source, self._table), order)
        self.source = source
        self.device = device
        self.loading = loading
        self.samples_per_epoch = samples_per_epoch
        self._on_gpu = device.type == "cuda"
        self._loader: ThreadLoader | ProcessLoader | None = None

    def batches(self, first_position: int, alike: bool = False) -> Iterator[Batch]:
        """Batches on the device from a position on, for ever; `alike`: the same ones on every rank. Errors of a worker's are
        raised here as they were there.
        """
        raw = map(self._unpacked, self._messages(first_position, ALONE if alike else self.place))
        if self._on_gpu:
            copied = (
                _copied_ahead(raw, self.device) if self.loading.copy_stream else (one.to(self.device) for one in raw)
            )
            return map(self._augmented, copied)
        return (Batch(one.image, one.label, tuple(one.positions), tuple(one.names)) for one in raw)

    def _augmented(self, raw: RawBatch) -> Batch:
        image, label = self.maker.augment(raw)
        return Batch(image, label, tuple(raw.positions), tuple(raw.names))

    def _messages(self, first_position: int, place: Place) -> Iterator[Any]:
        if not isinstance(self.source, SmartCache):
            yield from self._stream(first_position, None, place)
            return
        position = first_position
        while True:
            epoch = position // self.samples_per_epoch
            end = (epoch + 1) * self.samples_per_epoch
            self._stop_workers()
            self.source.open_epoch(epoch)
            # Only once the workers are there: a thread must not live while they are forked
            yield from self._stream(position, end, place, functools.partial(self.source.prepare_epoch, epoch + 1))
            position = end

    def _stream(
        self, first: int, end: int | None, place: Place, begun: Callable[[], None] = lambda: None
    ) -> Iterator[Any]:
        self._stop_workers()
        positions: Any = turns(first, self.maker.batch_size, place)
        if end is not None:
            positions = itertools.takewhile(lambda position: position < end, positions)
        dataset = _BatchesByPosition(self.maker, self._table, augment=not self._on_gpu)
        loading, look = self.loading, min(LOOK_SECONDS, self.loading.most_seconds)
        self._table.clear()
        workers, ahead = loading.workers, loading.prefetch_factor
        loader: ThreadLoader | ProcessLoader
        if workers and loading.kind == "thread":
            loader = ThreadLoader(dataset, positions, workers, ahead, self._pins, look)
            self._watch.begin(())
        else:
            loader = ProcessLoader(dataset, positions, workers, ahead, self._pins, look)
            self._watch.begin(loader.processes)
        self._loader = loader
        begun()
        while True:
            try:
                message = self._wait(loader, look)
            except StopIteration:
                return
            yield message

    def _wait(self, loader: ThreadLoader | ProcessLoader, look_seconds: float) -> Any:
        """The next message; raises the sentence about the workers where one of them ended, or where none moves any more."""
        while True:
            try:
                with self._watch.waiting():
                    message = next(loader)
            except NothingYet:
                self._watch.check(look_seconds)
                if isinstance(loader, ProcessLoader) and loader.pins_no_more:
                    raise MachineError("the thread that pins batches has ended; set data.pin_memory: off") from None
            except (RuntimeError, OSError, EOFError) as error:
                # A worker that died in the middle of sending shows as whatever went wrong with what it sent
                known = ended_worker(error, self.loading.workers) or self._watch.death_soon()
                if known is None:
                    raise
                raise known from error
            else:
                self._watch.received()
                return message

    @property
    def _pins(self) -> bool:
        return self.loading.pin_memory and self._on_gpu

    def close(self) -> None:
        """Ends the workers and gives up the cases."""
        self._stop_workers()
        self.source.close()

    def _stop_workers(self) -> None:
        loader, self._loader = self._loader, None
        broken = self._watch.broken or self._watch.death() is not None
        self._watch.end()
        if isinstance(loader, ProcessLoader):
            loader.close(broken)
        elif loader is not None and broken:
            loader.close(_SECONDS_FOR_A_HUNG_THREAD)
        elif loader is not None:
            loader.close()

    def _unpacked(self, message: Any) -> RawBatch:
        if isinstance(message, FasttrainError):
            raise message
        reason = message.get("by_pipe")
        if reason is not None and self._told is not None:
            self._told(
                f"batches go through pipes, which is slower, since /dev/shm took one no more ({reason})", "warning"
            )
            self._told = None
        return from_message(message)


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


class _BatchesByPosition(Dataset[Any]):
    """A map from a batch's first position to its message; what goes wrong in a worker travels as a value.

    The loader would wrap an exception in the text of a traceback, and the one clear sentence would be lost.
    """

    def __init__(self, maker: PatchMaker, table: Whereabouts, augment: bool) -> None:
        self.maker = maker
        self.table = table
        self.augment = augment

    def __getitem__(self, first_position: int) -> Any:
        try:
            raw = self.maker.make(first_position)
            if self.augment:
                image, label = self.maker.augment(raw)
                raw = RawBatch(image, label, {}, raw.positions, raw.names)
            return shared(as_message(raw))
        except FasttrainError as error:
            return error
        finally:
            self.table.leave()
