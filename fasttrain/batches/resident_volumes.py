"""Owns the filling of a device's memory with volumes: copied as they are made, and kept on the host where no room is left."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasttrain.batches.crop import CaseCentres, CentreTables
from fasttrain.batches.patch_maker import LABEL_TYPES
from fasttrain.batches.shards import Piece, Rooms, Shards, reach
from fasttrain.batches.staging import Stager
from fasttrain.data.caches import MadeTogether
from fasttrain.data.caches.filling import Gathering
from fasttrain.data.volumes import ITEM_BYTES
from fasttrain.kernels.patches import Volumes
from fasttrain.machine.ranks import Ranks
from fasttrain.recipe import Recipe
from fasttrain.samples import CaseSource, Sample
from fasttrain.wording import counted, size_in_memory

AXES = 3
DEVICE_SLOTS = 2
"""Batches whose boxes lie on the device at once: the one that is cut and the one that is copied."""
_LESS = 0.8
_FEWEST_VOXELS = 1 << 20
_WORTH_A_COPY = 0.05
_DTYPES = {"float32": torch.float32, "float16": torch.float16}

Told = Callable[[str, str], None]
"""Takes one sentence and its level."""


@dataclass(eq=False)
class Resident:
    """The cases of a set by index, those that the device has room for and the `rest`, which stays on the host.

    volumes: the cases and, where there is a rest, behind them `DEVICE_SLOTS` × batch size boxes of the size of a patch; the place
    of a case of the rest means nothing. tables: the centres of all cases. used_bytes: what the volumes on the device take.
    shards: where several cards hold the set in parts; `volumes` has all of them then.
    """

    volumes: Volumes
    tables: CentreTables
    names: tuple[str, ...]
    rest: dict[int, Sample]
    used_bytes: int
    shards: Shards | None = None

    def __len__(self) -> int:
        return len(self.names)

    def close(self) -> None:
        """Nothing of it may be read any more; what is this process's alone goes with the last reference."""
        if self.shards is not None:
            self.shards.close()


@dataclass(frozen=True)
class _Named:
    """A case as a pass over them knows it: faults are told in the order of the numbers."""

    number: int

    @property
    def name(self) -> str:
        return f"{self.number:09d}"


def voxel_bytes(recipe: Recipe) -> int:
    """What a voxel of a volume takes: its channels in the storage dtype and its label in 8 bits, or in 16 for a dose."""
    return recipe.stored_channels * ITEM_BYTES[recipe.data.storage_dtype] + recipe.task_facts.label_bytes


def slot_bytes(recipe: Recipe) -> int:
    """What the boxes of batches take on the device beside the volumes."""
    return DEVICE_SLOTS * box_bytes(recipe)


def box_bytes(recipe: Recipe) -> int:
    """What the boxes of one batch take, on the device as in pinned memory."""
    return recipe.training.batch_size * math.prod(recipe.reach) * voxel_bytes(recipe)


def fill(
    source: CaseSource | MadeTogether,
    recipe: Recipe,
    device: torch.device,
    room_bytes: int,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    told: Told = lambda text, level: None,
    sharing: Ranks | None = None,
) -> Resident:
    """Takes every case from `source` by `threads` threads and copies it to `device` as it comes; closes `source`. Where all ranks
    of a machine make them together, each takes all, and those that stay on the host are there once. With `sharing` each keeps a
    part on its device and reads the others' there; all call it alike, and none reads before all have returned.

    Memory for `room_bytes` of volumes is taken at once, or as much as there is; cases that find no room in it stay on the host.
    Only what the recipe asks for travels: images in `data.storage_dtype`, labels in 8 or 16 bits, both by way of pinned memory.
    `told` hears where the device has less room than that. Raises one DataError with the faults of all cases, and
    torch.OutOfMemoryError where not even the boxes of two batches find room.
    """
    room = _Room(recipe, device, room_bytes, told, sharing)
    taken: list[Sample | CaseCentres | None] = [None] * len(source)
    places = np.zeros(len(source), dtype=np.int64)
    owners = [room.rooms.own] * len(source)
    names = [""] * len(source)
    rest: dict[int, Sample] = {}

    def take(number: int, sample: Sample) -> None:
        place = room.copied(sample)
        names[number] = sample.name
        taken[number] = CaseCentres.of(sample)
        if place is None:
            rest[number] = sample
        else:
            owners[number], places[number] = place

    try:
        try:
            _take_each(source, take, threads, progress)
        finally:
            room.settle()
    except BaseException:
        if room.shards is not None:
            room.shards.close()
        raise
    centres = [found for found in taken if isinstance(found, CaseCentres)]
    volumes = room.volumes(places, owners, [in_three_axes(found.shape) for found in centres], bool(rest))
    used = room.rooms.used * voxel_bytes(recipe)
    resident = Resident(volumes, CentreTables(centres), tuple(names), rest, used, room.shards)
    told(f"gpu cache: {text_of(resident)}", "info")
    return resident


def _take_each(
    source: CaseSource | MadeTogether,
    take: Callable[[int, Sample], None],
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    if isinstance(source, MadeTogether):
        source.each(take, threads, progress)
        return
    gathering = Gathering(lambda case: take(case.number, source[case.number]), len(source), progress)
    gathering.over([_Named(number) for number in range(len(source))], threads)
    gathering.raise_faults()
    source.close()


def text_of(resident: Resident) -> str:
    """`212 of 300 cases (38.1 GiB) on the GPU, the rest from pinned memory`."""
    total, there = len(resident), len(resident) - len(resident.rest)
    held = size_in_memory(resident.used_bytes)
    if resident.shards is not None:
        rest = f", {len(resident.rest):,} more from pinned memory" if resident.rest else ""
        return f"{counted(there, 'case')} on {resident.shards.count} GPUs, {held} on this one{rest}"
    if there == total:
        return f"{counted(total, 'case')}, {held} on the GPU"
    return f"{there:,} of {counted(total, 'case')} ({held}) on the GPU, the rest from pinned memory"


def in_three_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A plane has a depth of 1."""
    return (1,) * (AXES - len(shape)) + tuple(shape)


def memory_of(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat memory of the device; raises torch.OutOfMemoryError."""
    return torch.empty(count, dtype=dtype, device=device)


class _Room:
    """The flat memory of the volumes, of which threads take pieces."""

    def __init__(
        self, recipe: Recipe, device: torch.device, room_bytes: int, told: Told, sharing: Ranks | None = None
    ) -> None:
        self.device = device
        self.channels = recipe.stored_channels
        self._boxes = DEVICE_SLOTS * recipe.training.batch_size
        self._patch = in_three_axes(recipe.reach)
        self._dtype = _DTYPES[recipe.data.storage_dtype]
        self._label_type = LABEL_TYPES[recipe.task_facts.label_bytes]
        self._item_bytes = voxel_bytes(recipe)
        self.shards = None if sharing is None else self._shared(room_bytes // self._item_bytes, told, sharing)
        if self.shards is None:
            room, self._images, self._labels = self._memory(room_bytes // self._item_bytes, told)
        self.rooms = Rooms([room]) if self.shards is None else self.shards.rooms
        self._lock = threading.Lock()
        self._own = threading.local()

    def copied(self, sample: Sample) -> tuple[int, int] | None:
        """Whose device it lies on and the first voxel of its place there, to which it is on its way; None where there is none."""
        assert sample.label is not None
        voxels = sample.label.numel()
        with self._lock:
            found = self.rooms.place(voxels)
        if found is None or found[0] != self.rooms.own:
            return found
        first = found[1]
        stager = self._stager()
        stager.copy(sample.image.reshape(self.channels, -1).T, self._part(self._images, first, voxels, self.channels))
        stager.copy(sample.label.reshape(-1, 1), self._part(self._labels, first, voxels, 1))
        return found

    def settle(self) -> None:
        """Waits until everything has arrived."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def volumes(self, places: np.ndarray, owners: list[int], lengths: list[tuple[int, ...]], streams: bool) -> Volumes:
        """What lies there, with room for the boxes of batches behind it where some are to come from the host."""
        if streams:
            size = math.prod(self._patch)
            places = np.concatenate([places, self.rooms.used + size * np.arange(self._boxes, dtype=np.int64)])
            lengths = [*lengths, *[self._patch] * self._boxes]
            owners = [*owners, *[self.rooms.own] * self._boxes]
        elif self.shards is None and self._labels.numel() - self.rooms.used > _WORTH_A_COPY * self._labels.numel():
            self._shrink()
        return Volumes(
            self._images,
            self._labels,
            torch.from_numpy(places).to(self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            self.channels,
            None if self.shards is None else self.shards.parts(owners, self.device),
        )

    def _shared(self, voxels: int, told: Told, ranks: Ranks) -> Shards | None:
        """Memory that the other ranks reach, for so many voxels or as many as have room; None, and told, where they cannot."""
        own: tuple[Piece, Piece] | str | None = None
        while own is None:
            try:
                own = self._shareable(voxels + self._boxes * math.prod(self._patch))
            except OSError as error:
                own = str(error)
            if own is None and voxels == 0:
                own = "one has no memory left"
            voxels = voxels if own is not None else int(voxels * _LESS) if voxels > _FEWEST_VOXELS else 0
        shards = reach(ranks, voxels, own, self.device)
        if isinstance(shards, Shards):
            assert not isinstance(own, str)
            self._images, self._labels = own[0].values, own[1].values
            return shards
        told(f"the GPUs cannot read each other's memory ({shards}): each keeps what it has room for", "warning")
        return None

    def _shareable(self, count: int) -> tuple[Piece, Piece] | None:
        """For so many voxels; None where there is no room."""
        images: Piece | None = None
        try:
            images = Piece(count * self.channels, self._dtype, self.device)
            return images, Piece(count, self._label_type, self.device)
        except (torch.OutOfMemoryError, OSError) as error:
            if images is not None:
                images.free()
            if isinstance(error, OSError):
                raise
        return None

    def _memory(self, voxels: int, told: Told) -> tuple[int, Tensor, Tensor]:
        """Room for so many voxels and the boxes behind them, or for as many as the device gives."""
        boxes, wanted = self._boxes * math.prod(self._patch), voxels
        while True:
            memory = self._pieces(voxels + boxes, needed=voxels == 0)
            if memory is None:
                # Below a hundredth of what was wanted nothing is left to gain
                voxels = int(voxels * _LESS) if voxels > wanted // 100 else 0
                continue
            if voxels < wanted:
                lacked, had = (size_in_memory(count * self._item_bytes) for count in (wanted, voxels))
                told(
                    f"the GPU had no room for {lacked} of volumes when they came; {had} of them lie there, the rest streams from "
                    "pinned memory",
                    "warning",
                )
            return voxels, *memory

    def _pieces(self, voxels: int, needed: bool) -> tuple[Tensor, Tensor] | None:
        """Memory for images and labels; where there is none, None or, where it is `needed`, torch's error."""
        try:
            images = memory_of(voxels * self.channels, self._dtype, self.device)
            return images, memory_of(voxels, self._label_type, self.device)
        except torch.OutOfMemoryError:
            if needed:
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _shrink(self) -> None:
        """Gives back what was taken for volumes that a crop to the foreground made smaller than their headers say."""
        try:
            used = self.rooms.used
            images, labels = self._images[: used * self.channels].clone(), self._labels[:used].clone()
        except torch.OutOfMemoryError:
            return
        self._images, self._labels = images, labels
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _part(self, memory: Tensor, first: int, voxels: int, channels: int) -> Tensor:
        return memory[first * channels : (first + voxels) * channels].view(voxels, channels)

    def _stager(self) -> Stager:
        if not hasattr(self._own, "stager"):
            self._own.stager = Stager(self.device)
        stager: Stager = self._own.stager
        return stager
