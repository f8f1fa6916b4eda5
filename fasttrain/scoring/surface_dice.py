"""Owns the surface Dice of two binary volumes at a tolerance in mm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from fasttrain.scoring.hd95 import bounding_box


def surface_dice(prediction: Tensor, label: Tensor, spacing_mm: Sequence[float], tolerance_mm: float) -> float | None:
    """The share of both surfaces that lies within `tolerance_mm` of the other (Nikolov et al. 2021), of bool volumes [*spatial].

    By MONAI's `compute_surface_dice`, whose surface is made of voxels at their full count. None where neither volume holds
    anything, 0 where only one does.
    """
    from monai.metrics import compute_surface_dice

    box = bounding_box(prediction | label)
    if box is None:
        return None
    predicted, expected = prediction[box].cpu(), label[box].cpu()
    if not predicted.any() or not expected.any():
        return 0.0
    with warnings.catch_warnings():
        # MONAI 1.6 calls a part of its own that it has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        share = compute_surface_dice(
            predicted[None, None],
            expected[None, None],
            class_thresholds=[float(tolerance_mm)],
            include_background=True,
            spacing=tuple(float(spacing) for spacing in spacing_mm),
        )
    return float(share.item())
