"""Owns the voxels that crops may be centred on: evenly thinned index lists, so that a draw is one lookup."""

from __future__ import annotations

import numpy as np
import torch

CENTRES_PER_CLASS = 10_000
"""More would not change the spread of crops, but would outweigh small volumes in memory."""


def class_centres(label: np.ndarray, classes: int) -> list[torch.Tensor]:
    """Flat C-order indices, int32 [n], of the voxels of each class 1 … `classes` in `label` [*spatial]; n ≤ 10 000."""
    flat = label.reshape(-1)
    foreground = np.flatnonzero(flat)
    values = flat[foreground]
    return [_thinned(foreground[values == value]) for value in range(1, classes + 1)]


def background_centres(image: np.ndarray, label: np.ndarray, above: float) -> torch.Tensor:
    """Flat indices, int32 [n], of voxels with label 0 and any channel of `image` [channel, *spatial] above `above`."""
    return _thinned(np.flatnonzero((label == 0) & (image > above).any(axis=0)))


def shifted(
    centres: torch.Tensor, shape: tuple[int, ...], padded: tuple[int, ...], before: tuple[int, ...]
) -> torch.Tensor:
    """The same voxels as flat indices of a volume of shape `padded`, in which `shape` begins at `before`."""
    if shape == padded:
        return centres
    places = np.unravel_index(centres.numpy(), shape)
    moved = tuple(place + offset for place, offset in zip(places, before, strict=True))
    return torch.from_numpy(np.ravel_multi_index(moved, padded).astype(np.int32))


def _thinned(indices: np.ndarray) -> torch.Tensor:
    """An even stride rather than a draw: the record must not depend on a generator."""
    if len(indices) > CENTRES_PER_CLASS:
        indices = indices[np.arange(CENTRES_PER_CLASS, dtype=np.int64) * len(indices) // CENTRES_PER_CLASS]
    return torch.from_numpy(indices.astype(np.int32))
