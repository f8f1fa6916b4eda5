"""Owns the Dice score of two volumes of class indices, and the counts that it is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Members = Sequence[Sequence[int]]
"""Of each region the class indices that it holds."""


def overlap_counts(
    prediction: Tensor, label: Tensor, class_count: int, hidden: Tensor | None = None, regions: Members = ()
) -> Tensor:
    """Voxels of each class index, int64 [3, class_count + 1]: in both, in the prediction, in the label; last: of all indices from
    `class_count` on. With `regions` of the background, of each region, and again of what is too large.

    Both are uint8 [*spatial], on one device, where the counts stay: a GPU is not waited for. Voxels that are True in `hidden`
    are 0 in both and count nowhere. Raises ValueError where the shapes differ.
    """
    if prediction.shape != label.shape:
        raise ValueError(f"prediction {tuple(prediction.shape)} and label {tuple(label.shape)} differ in shape")
    # torch's histogram asks a GPU how long it is to be
    counted = _by_histogram if prediction.device.type == "cpu" else _by_class
    counts = counted(prediction, label, class_count, regions)
    if hidden is not None:
        counts[:, 0] -= hidden.sum()
    return counts


def dice_of_counts(counts: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
    """Dice, 2·|A∩B| / (|A|+|B|), of every class index from 0 (the background) on, from `overlap_counts` as plain numbers.

    None for a class in neither volume (not counted); 0 for one that is in the prediction alone or in the label alone. The
    values are those of `monai.metrics.compute_dice`, from exact counts. Raises ValueError where an index was too large.
    """
    both, predicted, expected = counts
    classes = len(both) - 1
    if predicted[classes] or expected[classes]:
        raise ValueError(
            f"{predicted[classes]} voxels of the prediction and {expected[classes]} of the label "
            f"hold a class index of {classes} or more"
        )
    return tuple(
        2.0 * both[index] / (predicted[index] + expected[index]) if predicted[index] + expected[index] else None
        for index in range(classes)
    )


def _groups(class_count: int, regions: Members) -> Members:
    """The class indices that are counted together."""
    return [(0,), *regions] if regions else [(index,) for index in range(class_count)]


def members_of(volume: Tensor, group: Sequence[int]) -> Tensor:
    """Bool of the volume's shape: voxels whose class index is in the group."""
    inside = volume == group[0]
    for index in group[1:]:
        inside |= volume == index
    return inside


def _by_histogram(prediction: Tensor, label: Tensor, class_count: int, regions: Members = ()) -> Tensor:
    """One pass over pairs of indices, whose counts are then summed over each region's."""
    bins = class_count + 1
    # The pair fits a byte for up to 15 classes, an eighth of the memory of int64 on a large CT.
    kind = torch.uint8 if bins * bins <= 256 else torch.int32
    pairs = prediction.to(kind).clamp(max=class_count).mul_(bins).add_(label.to(kind).clamp(max=class_count))
    joint = torch.bincount(pairs.flatten(), minlength=bins * bins).view(bins, bins)
    groups = _groups(class_count, regions)
    inside = torch.zeros(len(groups) + 1, bins, dtype=torch.int64)
    for number, group in enumerate((*groups, (class_count,))):
        inside[number, list(group)] = 1
    both = ((inside @ joint) * inside).sum(1)
    return torch.stack([both, inside @ joint.sum(1), inside @ joint.sum(0)])


def _by_class(prediction: Tensor, label: Tensor, class_count: int, regions: Members = ()) -> Tensor:
    """A few passes a class, of which none needs an answer."""
    counts = []
    for group in _groups(class_count, regions):
        predicted, expected = members_of(prediction, group), members_of(label, group)
        counts += [(predicted & expected).sum(), predicted.sum(), expected.sum()]
    # No class has an index of 256, which a byte could not be compared with
    rest = [prediction.new_zeros((), dtype=torch.int64)] * 3
    if class_count <= 255:
        above = prediction >= class_count, label >= class_count
        rest = [(above[0] & above[1]).sum(), above[0].sum(), above[1].sum()]
    return torch.stack([*counts, *rest]).view(-1, 3).T.contiguous()
