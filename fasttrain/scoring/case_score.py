"""Owns the scores of one case."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring.dice import dice_by_class
from fasttrain.scoring.hd95 import hd95_mm


@dataclass(frozen=True)
class ClassScore:
    """Scores of one foreground class in one case; None: not counted (or, for `hd95`, not asked for).

    `hd95` is in mm; `hd95_penalised` says that it is the volume's diagonal, since the structure was missed or invented.
    """

    dice: float | None
    hd95: float | None = None
    hd95_penalised: bool = False


@dataclass(frozen=True)
class CaseScore:
    """Scores of one case: `classes` holds the foreground classes from class index 1 on."""

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
) -> CaseScore:
    """Scores `prediction` against `label`, both uint8 class indices [*spatial] on one device.

    `class_count` includes the background; `spacing_mm` is the voxel size of the grid they lie on. `ignores`: where the label
    is IGNORED nothing is scored; such a voxel is in no class's count, that of the background included. For HD95 it is
    outside every structure, in label and prediction alike, so that one which runs into ignored voxels ends at their border in
    both, and that border is a part of its surface. Raises ValueError where shapes differ or an index is not below
    `class_count`.
    """
    ignored = 0
    if ignores and prediction.shape == label.shape:
        hidden = label == IGNORED
        ignored = int(hidden.sum())
        prediction, label = prediction.masked_fill(hidden, 0), label.masked_fill(hidden, 0)
    background, *dices = dice_by_class(prediction, label, class_count, ignored)
    scores = []
    for index, dice in enumerate(dices, start=1):
        distance, penalised = None, False
        if hd95 and dice is not None:
            distance, penalised = hd95_mm(prediction == index, label == index, spacing_mm)
        scores.append(ClassScore(dice=dice, hd95=distance, hd95_penalised=penalised))
    return CaseScore(name=name, classes=tuple(scores), background_dice=background)
