"""Owns the voxels that crops may be centred on: evenly thinned index lists, so that a draw is one lookup.

A list is no larger than needed: uint16 where every voxel of the volume it points into has such a number, int32 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fasttrain.data.grids import slabs
from fasttrain.data.volumes import CENTRES_PER_CLASS, index_type


def class_centres(label: np.ndarray, classes: int) -> list[torch.Tensor]:
    """Flat C-order indices [n] of the voxels of each class 1 … `classes` in `label` [*spatial]; n ≤ 10 000."""
    counts = np.zeros(256, dtype=np.int64)
    for _, values in _foreground(label):
        counts += np.bincount(values, minlength=256)
    centres = [_Thinned(int(counts[value]), label.size) for value in range(1, classes + 1)]
    for indices, values in _foreground(label):
        for value in np.flatnonzero(np.bincount(values)):
            if value <= classes:
                centres[value - 1].add(indices[values == value])
    return [found.tensor() for found in centres]


def background_centres(image: np.ndarray, label: np.ndarray, above: float) -> torch.Tensor:
    """Flat indices [n] of voxels with label 0 and any channel of `image` [channel, *spatial] above `above`."""
    parts = [(rows, _background(image, label, above, rows)) for rows in slabs(label.shape)]
    found = _Thinned(sum(int(np.count_nonzero(part)) for _, part in parts), label.size)
    for rows, part in parts:
        found.add(np.flatnonzero(part) + rows.start * math.prod(label.shape[1:]))
    return found.tensor()


def _background(image: np.ndarray, label: np.ndarray, above: float, rows: slice) -> np.ndarray:
    return np.asarray((label[rows] == 0) & (image[:, rows] > above).any(axis=0))


def _foreground(label: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Flat indices of the voxels that are not 0 and their values, slab by slab: those of all would outweigh the image."""
    row = math.prod(label.shape[1:])
    for rows in slabs(label.shape):
        flat = label[rows].reshape(-1)
        found = np.flatnonzero(flat)
        # Resampled labels come as float32
        yield found + rows.start * row, flat[found].astype(np.uint8)


def shifted(centres: torch.Tensor, shape: Sequence[int], padded: Sequence[int], before: Sequence[int]) -> torch.Tensor:
    """The same voxels as flat indices of a volume of shape `padded`, in which `shape` begins at `before`."""
    if tuple(shape) == tuple(padded):
        return centres
    places = np.unravel_index(centres.numpy(), tuple(shape))
    moved = tuple(place + offset for place, offset in zip(places, before, strict=True))
    return torch.from_numpy(np.ravel_multi_index(moved, tuple(padded)).astype(index_type(math.prod(padded))))


class _Thinned:
    """At most CENTRES_PER_CLASS of `count` indices, which come in order and in parts, by an even stride.

    No draw: the record must not depend on a generator.
    """

    def __init__(self, count: int, voxels: int) -> None:
        places = np.arange(min(count, CENTRES_PER_CLASS), dtype=np.int64)
        self._places = places * count // CENTRES_PER_CLASS if count > CENTRES_PER_CLASS else places
        self._type = index_type(voxels)
        self._found: list[np.ndarray] = [np.empty(0, dtype=self._type)]
        self._seen = 0

    def add(self, indices: np.ndarray) -> None:
        first, end = np.searchsorted(self._places, (self._seen, self._seen + len(indices)))
        self._found.append(indices[self._places[first:end] - self._seen].astype(self._type))
        self._seen += len(indices)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self._found))
