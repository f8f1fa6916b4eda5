"""Owns resampling to another spacing along the axes of a grid: linear for images, nearest for labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fasttrain.data.grids import is_sheared
from fasttrain.data.volumes import voxels_along

_BLOCK_VALUES = 1 << 18
"""Of the planes that are worked on at once, a megabyte: what is read again then lies in the processor's cache."""


def resample(
    steps: Sequence[torch.Tensor], affine: np.ndarray, own: np.ndarray, spacing: Sequence[float]
) -> tuple[list[torch.Tensor], np.ndarray]:
    """Image (linear, float32) and label (nearest) [channel, *spatial] of spacing `own` at the new `spacing`, and their affine.

    Voxel i of the new grid lies at i × new ÷ own; the border is held where the last one lies beyond it. The result is that of
    MONAI's `Spacing` (bilinear and nearest, padding "border") to the rounding of its sampling places; separable, a CT takes a
    tenth of the time. A sheared grid, whose new axes are not those of the old, is left to MONAI.
    """
    shape = tuple(steps[0].shape[1:])
    if is_sheared(affine[:-1, :-1], shape):
        return _resampled_by_monai(steps, affine, spacing)
    stride = np.asarray(spacing, dtype=np.float64) / own
    places = []
    for length, step in zip(shape, stride, strict=True):
        places.append(np.minimum(np.arange(voxels_along(length, step)) * step, length - 1.0))
    image = torch.from_numpy(linear_at(steps[0].numpy(), places))
    labels = [torch.from_numpy(nearest_at(step.numpy(), places)) for step in steps[1:]]
    moved = np.array(affine, dtype=np.float64)
    moved[:-1, :-1] *= stride
    return [image, *labels], moved


def linear_at(values: np.ndarray, places: Sequence[np.ndarray]) -> np.ndarray:
    """values [channel, *spatial] float32 at every combination of `places`: for each axis an array of indices within bounds."""
    result = np.empty((values.shape[0], *(len(along) for along in places)), dtype=np.float32)
    ends = [_Between(along, length) for along, length in zip(places, values.shape[1:], strict=True)]
    rows = max(1, _BLOCK_VALUES // max(int(np.prod(values.shape[2:])), 1))
    for channel, target in zip(values, result, strict=True):
        for first in range(0, len(target), rows):
            part = ends[0].of(channel, 0, slice(first, first + rows))
            for axis, between in enumerate(ends[1:], start=1):
                part = between.of(part, axis)
            target[first : first + rows] = part
    return result


def nearest_at(values: np.ndarray, places: Sequence[np.ndarray]) -> np.ndarray:
    """values [channel, *spatial] of the voxels nearest to `places`; of two as near, the even one."""
    for axis, along in enumerate(places, start=1):
        values = values.take(np.rint(along).astype(np.intp), axis=axis)
    return values


class _Between:
    """Along one axis the two neighbours of each place and how far it lies from the lower one."""

    def __init__(self, places: np.ndarray, length: int) -> None:
        self.lower = np.floor(places).astype(np.intp)
        self.upper = np.minimum(self.lower + 1, length - 1)
        self.share = (places - self.lower).astype(np.float32)
        self.all_kept = np.array_equal(places, np.arange(length))

    def of(self, values: np.ndarray, axis: int, part: slice = slice(None)) -> np.ndarray:
        """Interpolated at the places of `part` along `axis`; exact where both neighbours are equal."""
        if self.all_kept:
            return values[(slice(None),) * axis + (part,)]
        lower = values.take(self.lower[part], axis=axis)
        between = values.take(self.upper[part], axis=axis)
        between -= lower
        between *= self.share[part].reshape(-1, *(1,) * (values.ndim - 1 - axis))
        between += lower
        return between


def _resampled_by_monai(
    steps: Sequence[torch.Tensor], affine: np.ndarray, spacing: Sequence[float]
) -> tuple[list[torch.Tensor], np.ndarray]:
    # MONAI takes a second or more to load
    from monai.data import MetaTensor
    from monai.transforms import Spacing

    done = []
    for step, mode in zip(steps, ("bilinear", "nearest"), strict=False):
        # float32 is exact to 1e-4 voxel at 1000 voxels an axis, at half the time and memory of MONAI's float64.
        spaced = Spacing(pixdim=spacing, mode=mode, padding_mode="border", dtype=np.float32)
        done.append(spaced(MetaTensor(step, affine=affine)))
    return [step.as_tensor() for step in done], np.asarray(done[0].affine, dtype=np.float64)
