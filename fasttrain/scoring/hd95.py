"""Owns the 95th percentile of the Hausdorff distance of two binary volumes, and what a missing one costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def volume_diagonal_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> float:
    """The diagonal of the volume's extent, shape × spacing, from outer corner to outer corner."""
    return math.sqrt(sum((size * spacing) ** 2 for size, spacing in zip(shape, spacing_mm, strict=True)))


def hd95_mm(prediction: Tensor, label: Tensor, spacing_mm: Sequence[float]) -> tuple[float | None, bool]:
    """(HD95 in mm, whether it is a penalty) of two bool volumes [*spatial] with `spacing_mm` a voxel axis.

    The larger of the two directed 95th percentiles of the distances between surfaces, by MONAI's
    `compute_hausdorff_distance`. A structure in one volume alone costs the volume's diagonal; in neither: None.
    """
    # Loads seconds of MONAI and SciPy, which a run without HD95 has no use for
    from monai.metrics import compute_hausdorff_distance

    box = bounding_box(prediction | label)
    if box is None:
        return None, False
    # Only the box leaves the device: MONAI's surfaces and its tree of their voxels are made on the CPU.
    predicted, expected = prediction[box].cpu(), label[box].cpu()
    if not predicted.any() or not expected.any():
        return volume_diagonal_mm(prediction.shape, spacing_mm), True
    with warnings.catch_warnings():
        # MONAI 1.6 calls a part of its own that it has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        distance = compute_hausdorff_distance(
            predicted[None, None],
            expected[None, None],
            include_background=True,
            percentile=95,
            spacing=tuple(float(spacing) for spacing in spacing_mm),
        )
    return float(distance.item()), False


def bounding_box(mask: Tensor) -> tuple[slice, ...] | None:
    """The box of the true voxels and one voxel around it, within the volume; None where there are none."""
    slices = []
    for axis, size in enumerate(mask.shape):
        others = [other for other in range(mask.ndim) if other != axis]
        hits = torch.nonzero(mask.any(dim=others) if others else mask).flatten().tolist()
        if not hits:
            return None
        slices.append(slice(max(hits[0] - 1, 0), min(hits[-1] + 2, size)))
    return tuple(slices)
