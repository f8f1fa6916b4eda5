"""Owns where the windows of a volume lie, in which order they are computed, and how much each of their voxels weighs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

_SIGMA_SCALE = 0.125
"""Of a Gaussian's sigma to the window's length; MONAI's own."""
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True)
class Layout:
    """MONAI's grid of windows over a volume [*spatial], whose last window along an axis is moved back to the edge.

    An axis shorter than the patch is padded with zeros on both sides, `before` voxels at its beginning; `starts` count from
    there. axis: the one along which the volume is the most windows long. Windows come in the order of their starts along it, so
    that a slab one window thick is all that is ever open.
    """

    spatial: tuple[int, ...]
    patch: tuple[int, ...]
    before: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    axis: int

    @property
    def windows(self) -> int:
        """How many there are."""
        return math.prod(map(len, self.starts))

    @property
    def inner(self) -> tuple[slice, ...]:
        """Where the volume lies in its padded form."""
        return tuple(slice(gap, gap + size) for gap, size in zip(self.before, self.spatial, strict=True))

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape [*spatial] of what is open at a time, padding included."""
        padded = [max(pair) for pair in zip(self.spatial, self.patch, strict=True)]
        padded[self.axis] = self.patch[self.axis]
        return tuple(padded)

    def corners(self) -> Iterator[tuple[int, ...]]:
        """The first voxel of each window, in the padded volume."""
        order = [self.axis, *(axis for axis in range(len(self.patch)) if axis != self.axis)]
        back = [order.index(axis) for axis in range(len(order))]
        for corner in product(*(self.starts[axis] for axis in order)):
            yield tuple(corner[place] for place in back)

    def overlap_with(self, corner: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(where in the volume, where in the window) the voxels lie that a window and the volume share."""
        there, here = [], []
        for start, length, gap, size in zip(corner, self.patch, self.before, self.spatial, strict=True):
            low, high = max(start - gap, 0), min(start - gap + length, size)
            there.append(slice(low, high))
            here.append(slice(low - start + gap, high - start + gap))
        return tuple(there), tuple(here)


def of_all_channels(box: Sequence[slice]) -> tuple[slice, ...]:
    """The index of a box [*spatial] in [channel, *spatial]."""
    return (slice(None), *box)


def lay_out(shape: Sequence[int], patch: Sequence[int], overlap: float) -> Layout:
    """The windows over a volume of `shape` voxels."""
    starts, before = [], []
    for size, length in zip(shape, patch, strict=True):
        step = max(int(length * (1 - overlap)), 1)
        padded = max(size, length)
        starts.append((*range(0, padded - length, step), padded - length))
        before.append((padded - size) // 2)
    axis = max(range(len(starts)), key=lambda one: shape[one] / patch[one])
    return Layout(tuple(shape), tuple(patch), tuple(before), tuple(starts), axis)


def count_windows(shape: Sequence[int], patch: Sequence[int], overlap: float) -> int:
    """How many windows cover a volume of `shape` voxels."""
    return lay_out(shape, patch, overlap).windows


@lru_cache(maxsize=8)
def importance(patch: tuple[int, ...], blend: str, device: torch.device) -> Tensor:
    """Weights [*patch] of a window's voxels, float32: those of MONAI's `compute_importance_map`.

    Made on the host and kept, since a volume would wait for them otherwise.
    """
    with torch.inference_mode(False):
        weights = torch.ones((), dtype=torch.float32)
        for length in patch:
            line = torch.ones(length, dtype=torch.float32)
            if blend == "gaussian":
                places = torch.arange(-(length - 1) / 2.0, (length - 1) / 2.0 + 1, dtype=torch.float32)
                line = torch.exp(places**2 / (-2 * (length * _SIGMA_SCALE) ** 2))
            weights = weights.unsqueeze(-1) * line
        return weights.clamp_(min=max(float(weights.min()), _LEAST_WEIGHT)).to(device)
