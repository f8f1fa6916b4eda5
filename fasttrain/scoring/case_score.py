"""Owns the scores of one case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring.dice import Members, dice_of_counts, members_of, overlap_counts
from fasttrain.scoring.hd95 import hd95_mm


@dataclass(frozen=True)
class ClassScore:
    """Scores of one foreground class in one case; None: not counted (or, for `hd95`, not asked for).

    `hd95` is in mm; `hd95_penalised` says that it is the volume's diagonal, since the structure was missed or invented.
    `slice_dices` are those of the slices that count (`data.slices`).
    """

    dice: float | None
    hd95: float | None = None
    hd95_penalised: bool = False
    slice_dices: tuple[float, ...] = ()


@dataclass(frozen=True)
class CaseScore:
    """Scores of one case: `classes` holds the foreground classes from class index 1 on, or the regions in their order."""

    name: str
    classes: tuple[ClassScore, ...]
    background_dice: float | None


def score_case(
    name: str,
    prediction: Tensor,
    label: Tensor,
    class_count: int,
    spacing_mm: tuple[float, ...],
    hd95: bool,
    ignores: bool = False,
    regions: Members = (),
) -> CaseScore:
    """Scores `prediction` against `label`, both uint8 class indices [*spatial] on one device.

    `class_count` includes the background; `spacing_mm` is the voxel size of the grid they lie on. `ignores`: where the label
    is IGNORED nothing is scored; such a voxel is in no class's count, that of the background included. For HD95 it is
    outside every structure, in label and prediction alike, so that one which runs into ignored voxels ends at their border in
    both, and that border is a part of its surface. regions: of each the class indices that it holds; they are scored in the
    place of the classes, each as one structure. Raises ValueError where shapes differ or an index is not below
    `class_count`.
    """
    prediction, label, hidden = _seen(prediction, label, ignores)
    score = score_counts(name, overlap_counts(prediction, label, class_count, hidden, regions).tolist())
    if not hd95:
        return score
    classes = []
    groups = regions or [(index,) for index in range(1, class_count)]
    for group, one in zip(groups, score.classes, strict=True):
        distance, penalised = None, False
        if one.dice is not None:
            distance, penalised = hd95_mm(members_of(prediction, group), members_of(label, group), spacing_mm)
        classes.append(ClassScore(dice=one.dice, hd95=distance, hd95_penalised=penalised))
    return CaseScore(name=name, classes=tuple(classes), background_dice=score.background_dice)


def count_case(
    prediction: Tensor, label: Tensor, class_count: int, ignores: bool = False, regions: Members = ()
) -> Tensor:
    """What `score_counts` makes a case's Dice scores of, int64 [3, classes or regions + 2] on the device, not waited for.

    For several cases, whose counts are read together. The arguments are those of `score_case`.
    """
    prediction, label, hidden = _seen(prediction, label, ignores)
    return overlap_counts(prediction, label, class_count, hidden, regions)


def score_counts(name: str, counts: Sequence[Sequence[int]]) -> CaseScore:
    """The score of a case, without HD95, from its counts. Raises ValueError where an index was not below the class count."""
    background, *dices = dice_of_counts(counts)
    return CaseScore(name=name, classes=tuple(ClassScore(dice) for dice in dices), background_dice=background)


def _seen(prediction: Tensor, label: Tensor, ignores: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both without what is ignored, which is background in both, and where that was."""
    if not ignores or prediction.shape != label.shape:
        return prediction, label, None
    hidden = label == IGNORED
    return prediction.masked_fill(hidden, 0), label.masked_fill(hidden, 0), hidden
