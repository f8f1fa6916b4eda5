"""Owns the one resampling into which all linear maps of a batch are fused: image and label in a single pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resample(image: Tensor, label: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Moves voxels by a linear map about the centre of each patch.

    image: [sample, channel, *spatial] float32, linear interpolation; label: [sample, 1, *spatial] uint8, nearest voxel;
    matrix: [sample, d, d], from an output voxel's offset from the centre to the input's, in voxels and array axis order.
    What lies outside repeats the edge in image and label alike, so that the two still agree there.
    """
    grid = sampling_grid(matrix.to(image.device), image.shape[2:])
    moved = F.grid_sample(image, grid.to(image.dtype), mode="bilinear", padding_mode="border", align_corners=False)
    moved_label = F.grid_sample(label.float(), grid, mode="nearest", padding_mode="border", align_corners=False)
    return moved, moved_label.to(label.dtype)


def sampling_grid(matrix: Tensor, size: torch.Size) -> Tensor:
    """The grid that `grid_sample` wants, [sample, *spatial, d], for `matrix` in voxels.

    grid_sample's coordinates run from −1 to 1 over the whole extent of an axis and name the last array axis first. They are
    summed up axis by axis: affine_grid multiplies matrices, and with TF32 its coordinates are off by hundredths of a voxel.
    """
    axes = len(size)
    offsets = [
        (torch.arange(length, dtype=matrix.dtype, device=matrix.device) - (length - 1) / 2).reshape(
            [1, *(length if other == axis else 1 for other in range(axes))]
        )
        for axis, length in enumerate(size)
    ]
    coordinates = []
    for axis, length in reversed(list(enumerate(size))):
        scaled = matrix[:, axis] * (2.0 / length)
        parts = [scaled[:, other].reshape(-1, *(1,) * axes) * offsets[other] for other in range(axes)]
        coordinates.append(sum(parts[1:], parts[0]))
    return torch.stack(coordinates, dim=-1)
