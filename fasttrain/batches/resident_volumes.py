"""Owns the filling of a device's memory with volumes: copied as they are made, and kept on the host where no room is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fasttrain.batches.crop import CaseCentres, CentreTables
from fasttrain.batches.device_room import DEVICE_SLOTS, DeviceRoom, Told, in_three_axes, voxel_bytes
from fasttrain.batches.shards import Shards
from fasttrain.data.caches import MadeTogether
from fasttrain.data.caches.filling import Gathering
from fasttrain.kernels.patches import Volumes
from fasttrain.machine.ranks import Ranks
from fasttrain.recipe import Recipe
from fasttrain.samples import CaseSource, Sample
from fasttrain.wording import counted, size_in_memory


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
    room = DeviceRoom(recipe, device, room_bytes, told, sharing)
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
