"""Owns the Dice score of two volumes of class indices."""

from __future__ import annotations

import torch
from torch import Tensor


def dice_by_class(prediction: Tensor, label: Tensor, class_count: int, ignored: int = 0) -> tuple[float | None, ...]:
    """Dice, 2·|A∩B| / (|A|+|B|), of every class index from 0 (the background) on.

    None for a class in neither volume (not counted); 0 for one that is in the prediction alone or in the label alone.
    Both are uint8 [*spatial], on one device. The values are those of `monai.metrics.compute_dice`, from a joint
    histogram in place of one-hot volumes: exact counts, one pass, one wait for the device. Raises ValueError where
    the shapes differ or an index is not below `class_count`. `ignored` voxels are 0 in both and count nowhere.
    """
    if prediction.shape != label.shape:
        raise ValueError(f"prediction {tuple(prediction.shape)} and label {tuple(label.shape)} differ in shape")
    joint = _joint_histogram(prediction, label, class_count)
    joint[0][0] -= ignored
    predicted, expected = [sum(row) for row in joint], [sum(column) for column in zip(*joint, strict=True)]
    if predicted[class_count] or expected[class_count]:
        raise ValueError(
            f"{predicted[class_count]} voxels of the prediction and {expected[class_count]} of the label "
            f"hold a class index of {class_count} or more"
        )
    return tuple(
        2.0 * joint[index][index] / (predicted[index] + expected[index]) if predicted[index] + expected[index] else None
        for index in range(class_count)
    )


def _joint_histogram(prediction: Tensor, label: Tensor, class_count: int) -> list[list[int]]:
    """Voxels by (predicted, expected) index; the last row and column hold all indices from `class_count` on."""
    bins = class_count + 1
    # The pair fits a byte for up to 15 classes, an eighth of the memory of int64 on a large CT.
    kind = torch.uint8 if bins * bins <= 256 else torch.int32
    pairs = prediction.to(kind).clamp(max=class_count).mul_(bins).add_(label.to(kind).clamp(max=class_count))
    counts: list[int] = torch.bincount(pairs.flatten(), minlength=bins * bins).tolist()
    return [counts[start : start + bins] for start in range(0, bins * bins, bins)]
