"""Owns the memory of a device that volumes fill: flat, taken at once, of which each case gets a place."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fasttrain.batches.patch_maker import LABEL_TYPES
from fasttrain.batches.shards import Piece, Rooms, Shards, reach
from fasttrain.batches.staging import Stager
from fasttrain.data.volumes import ITEM_BYTES
from fasttrain.kernels.patches import Volumes
from fasttrain.machine.ranks import Ranks
from fasttrain.recipe import Recipe
from fasttrain.samples import Sample
from fasttrain.wording import size_in_memory

AXES = 3
DEVICE_SLOTS = 2
"""Batches whose boxes lie on the device at once: the one that is cut and the one that is copied."""
_LESS = 0.8
_FEWEST_VOXELS = 1 << 20
_WORTH_A_COPY = 0.05
_DTYPES = {"float32": torch.float32, "float16": torch.float16}

Told = Callable[[str, str], None]
"""Takes one sentence and its level."""


class DeviceRoom:
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
        if self.device.type == "cuda":
            # What torch keeps for itself is no room for others
            torch.cuda.empty_cache()
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


def voxel_bytes(recipe: Recipe) -> int:
    """What a voxel of a volume takes: its channels in the storage dtype and its label in 8 bits, or in 16 for a dose."""
    return recipe.stored_channels * ITEM_BYTES[recipe.data.storage_dtype] + recipe.task_facts.label_bytes


def in_three_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A plane has a depth of 1."""
    return (1,) * (AXES - len(shape)) + tuple(shape)


def memory_of(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat memory of the device; raises torch.OutOfMemoryError."""
    return torch.empty(count, dtype=dtype, device=device)
