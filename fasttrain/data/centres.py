"""Owns the voxels that crops may be centred on: evenly thinned index lists, so that a draw is one lookup.

A list is no larger than needed: uint16 where every voxel of the volume it points into has such a number, int32 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

CENTRES_PER_CLASS = 10_000
"""More would not change the spread of crops, but would outweigh small volumes in memory."""

_SMALL_VOXELS = 1 << 16


def index_type(voxels: int) -> type[np.uint16] | type[np.int32]:
    """The type of the indices into a volume of so many voxels."""
    return np.uint16 if voxels <= _SMALL_VOXELS else np.int32


def class_centres(label: np.ndarray, classes: int) -> list[torch.Tensor]:
    """Flat C-order indices [n] of the voxels of each class 1 … `classes` in `label` [*spatial]; n ≤ 10 000."""
    flat = label.reshape(-1)
    foreground = np.flatnonzero(flat)
    values = flat[foreground]
    return [_thinned(foreground[values == value], flat.size) for value in range(1, classes + 1)]


def background_centres(image: np.ndarray, label: np.ndarray, above: float) -> torch.Tensor:
    """Flat indices [n] of voxels with label 0 and any channel of `image` [channel, *spatial] above `above`."""
    return _thinned(np.flatnonzero((label == 0) & (image > above).any(axis=0)), label.size)


def shifted(centres: torch.Tensor, shape: Sequence[int], padded: Sequence[int], before: Sequence[int]) -> torch.Tensor:
    """The same voxels as flat indices of a volume of shape `padded`, in which `shape` begins at `before`."""
    if tuple(shape) == tuple(padded):
        return centres
    places = np.unravel_index(centres.numpy(), tuple(shape))
    moved = tuple(place + offset for place, offset in zip(places, before, strict=True))
    return torch.from_numpy(np.ravel_multi_index(moved, tuple(padded)).astype(index_type(math.prod(padded))))


def _thinned(indices: np.ndarray, voxels: int) -> torch.Tensor:
    """An even stride rather than a draw: the record must not depend on a generator."""
    if len(indices) > CENTRES_PER_CLASS:
        indices = indices[np.arange(CENTRES_PER_CLASS, dtype=np.int64) * len(indices) // CENTRES_PER_CLASS]
    return torch.from_numpy(indices.astype(index_type(voxels)))
