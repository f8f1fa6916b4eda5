"""Owns the boxes of patches whose cases stay on the host: cut ahead by threads into pinned memory, copied beside the step.

Threads make no call to the GPU: one of another thread's would spoil a CUDA graph that is being recorded. What they cut is known
ahead of time, since what is drawn is a function of the position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fasttrain.batches.crop import cut_patch
from fasttrain.batches.device_room import DEVICE_SLOTS
from fasttrain.batches.patch_maker import Drawn, PatchMaker
from fasttrain.batches.resident_volumes import Resident
from fasttrain.batches.staging import pinned
from fasttrain.batches.thread_loader import ThreadLoader

_AHEAD = 2
"""Batches that each thread has ready."""
_HELD = 3
"""Pieces of pinned memory beside those that threads write to: batches whose copies are on their way."""


def slot_count(threads: int) -> int:
    """Batches whose boxes lie in pinned memory where so many threads cut them."""
    return threads * _AHEAD + _HELD


class Slot:
    """Pinned memory for the boxes of one batch: images [sample, *size, channel] and labels [sample, *size].

    size: of a box in the axes of a volume, the patch and the slices beside it.
    """

    def __init__(self, resident: Resident, batch_size: int, size: tuple[int, ...]) -> None:
        volumes = resident.volumes
        voxels, on_gpu = batch_size * math.prod(size), volumes.images.is_cuda
        take = pinned if on_gpu else _plain
        self.images = take(voxels * volumes.channels, volumes.images.dtype).view(batch_size, *size, volumes.channels)
        self.labels = take(voxels, volumes.labels.dtype).view(batch_size, *size)
        self.copied = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Until what was last in it has been copied."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(frozen=True, eq=False)
class Boxed:
    """What is drawn of a batch, and the boxes of its samples `rows` [k], which are the first k of `slot`."""

    drawn: Drawn
    rows: np.ndarray
    slot: Slot


class BoxStream:
    """The batches of `maker` from a position on, in order, with the boxes of cases that are not on the device."""

    def __init__(self, maker: PatchMaker, resident: Resident, positions: Iterator[int], threads: int) -> None:
        size = maker.reach
        self._slots = [Slot(resident, maker.batch_size, size) for _ in range(slot_count(threads))]
        tasks = self._tasks(positions)
        self._loader = ThreadLoader(_Cutting(maker, resident), tasks, threads, _AHEAD, pin=False)

    @property
    def ready(self) -> bool:
        """Whether the next one need not be waited for."""
        return self._loader.ready

    def __next__(self) -> Boxed:
        boxed: Boxed = next(self._loader)
        return boxed

    def close(self) -> None:
        """Ends the threads."""
        self._loader.close()

    def _tasks(self, positions: Iterator[int]) -> Iterator[tuple[int, Slot]]:
        """Asked by the trainer's own thread, which therefore waits here where it is ahead of the GPU by all slots."""
        for number, position in enumerate(positions):
            slot = self._slots[number % len(self._slots)]
            slot.wait()
            yield position, slot


class _Cutting(Dataset[Any]):
    """From a position and a slot to the boxes of the batch there."""

    def __init__(self, maker: PatchMaker, resident: Resident) -> None:
        self._maker = maker
        self._resident = resident
        self._on_host = np.zeros(len(resident), dtype=bool)
        self._on_host[list(resident.rest)] = True

    def __getitem__(self, task: tuple[int, Slot]) -> Boxed:
        position, slot = task
        size = tuple(self._maker.patch.size)
        drawn = self._maker.draw(position, self._resident.tables)
        rows = np.flatnonzero(self._on_host[drawn.cases])
        for number, row in enumerate(rows.tolist()):
            sample, corner = self._resident.rest[int(drawn.cases[row])], drawn.corners[row].tolist()
            assert sample.label is not None
            for target, volume in ((slot.images[number], sample.image), (slot.labels[number], sample.label)):
                patch = cut_patch(volume, corner, size, self._maker.neighbours)
                slices = patch.unflatten(0, (-1, len(volume))).movedim(1, -1)
                target.view(slices.shape).copy_(slices)
        return Boxed(drawn, rows, slot)


class DeviceSlots:
    """The places of boxes behind the resident volumes, taken in turn; copies run on a stream of their own."""

    def __init__(self, resident: Resident, batch_size: int, size: tuple[int, ...]) -> None:
        volumes, self._cases, self._batch_size = resident.volumes, len(resident), batch_size
        voxels = math.prod(size)
        first, count = int(volumes.places[self._cases]), DEVICE_SLOTS * batch_size * voxels
        self._images = volumes.images[first * volumes.channels : (first + count) * volumes.channels]
        self._labels = volumes.labels[first : first + count]
        self._images = self._images.view(DEVICE_SLOTS, batch_size, *size, volumes.channels)
        self._labels = self._labels.view(DEVICE_SLOTS, batch_size, *size)
        self._device = volumes.images.device
        self._number = 0
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            self._used = [torch.cuda.Event() for _ in range(DEVICE_SLOTS)]

    def begin(self, boxed: Boxed) -> Placed:
        """Copies the boxes of a batch to the device, once those that lay there were read."""
        place, count = self._number % DEVICE_SLOTS, len(boxed.rows)
        self._number += 1
        if self._stream is None:
            self._copy(place, boxed)
        elif count:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._used[place])
                self._copy(place, boxed)
                assert boxed.slot.copied is not None
                boxed.slot.copied.record()
        first = self._cases + place * self._batch_size
        return Placed(boxed, place, np.arange(first, first + count, dtype=np.int64))

    def _copy(self, place: int, boxed: Boxed) -> None:
        for target, staged in ((self._images, boxed.slot.images), (self._labels, boxed.slot.labels)):
            target[place, : len(boxed.rows)].copy_(staged[: len(boxed.rows)], non_blocking=True)

    def await_copy(self, placed: Placed) -> None:
        """The device's work from here on sees the boxes."""
        if self._stream is not None and len(placed.boxed.rows):
            assert placed.boxed.slot.copied is not None
            torch.cuda.current_stream(self._device).wait_event(placed.boxed.slot.copied)

    def give_back(self, placed: Placed) -> None:
        """Of what the device does from here on nothing reads the boxes."""
        if self._stream is not None:
            self._used[placed.place].record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, eq=False)
class Placed:
    """A batch whose boxes are on their way to the device: `volumes` [k], by which the kernel knows those of `boxed.rows`."""

    boxed: Boxed
    place: int
    volumes: np.ndarray

    def drawn(self) -> Drawn:
        """As the kernel is to read it: a box is a volume of its own, which the patch fills."""
        drawn, rows = self.boxed.drawn, self.boxed.rows
        cases, corners = drawn.cases.copy(), drawn.corners.copy()
        cases[rows], corners[rows] = self.volumes, 0
        return Drawn(cases, corners, drawn.draws, drawn.positions)


def _plain(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)
