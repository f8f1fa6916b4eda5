"""Owns the one resampling into which all maps of a batch are fused: image and label in a single pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.augment.technique import sent


@dataclass(frozen=True)
class Displacement:
    """How the samples at `rows` [chosen] of a batch are bent: `field` [chosen, d, *spatial], in voxels, array axis order."""

    rows: Tensor
    field: Tensor


def resample(
    image: Tensor, label: Tensor, matrix: Tensor, displacement: Displacement | None = None
) -> tuple[Tensor, Tensor]:
    """Moves voxels by a linear map about the centre of each patch, after a displacement where there is one.

    image: [sample, channel, *spatial] float32, linear interpolation; label: [sample, 1, *spatial] uint8, nearest voxel;
    matrix: [sample, d, d], from an output voxel's offset from the centre to the input's, in voxels and array axis order.
    A voxel at x looks at matrix · (x + displacement(x)): nnU-Net's order, in which no rotation can fold a field without folds.
    What lies outside repeats the edge in image and label alike, so that the two still agree there.
    """
    matrix = sent(matrix, image.device)
    grid = sampling_grid(matrix, image.shape[2:])
    if displacement is not None:
        rows = sent(displacement.rows, image.device)
        grid.index_add_(0, rows, _bends(matrix[rows], displacement.field))
    grid = grid.to(image.dtype)
    moved = F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
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


def _bends(matrix: Tensor, field: Tensor) -> Tensor:
    """What `field` adds to the sampling grid, [sample, *spatial, d]; summed up axis by axis for the same reason."""
    axes = field.shape[1]
    coordinates = []
    for axis in reversed(range(axes)):
        scaled = (matrix[:, axis] * (2.0 / field.shape[axis + 2])).reshape(-1, axes, *(1,) * axes)
        total = field[:, 0] * scaled[:, 0]
        for other in range(1, axes):
            total.addcmul_(field[:, other], scaled[:, other])
        coordinates.append(total)
    return torch.stack(coordinates, dim=-1)
