"""Owns the Dice of single slices, told beside that of the volumes they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring.case_score import CaseScore
from fasttrain.scoring.dice import Members, members_of

SliceDices = dict[str, tuple[float, int]]
"""Of a case the mean Dice of the slices that count, and their number, by class."""


def count_slices(
    prediction: Tensor, label: Tensor, axis: int, class_count: int, ignores: bool = False, regions: Members = ()
) -> Tensor:
    """Voxels of each foreground class, or region, in each slice across `axis`, int64 [3, class, slice]: in both, in the
    prediction, in the label. On the device, which is not waited for; the arguments are those of `score_case`.
    """
    if ignores:
        hidden = label == IGNORED
        prediction, label = prediction.masked_fill(hidden, 0), label.masked_fill(hidden, 0)
    within = [other for other in range(label.ndim) if other != axis]
    counts = []
    for group in regions or [(index,) for index in range(1, class_count)]:
        predicted, expected = members_of(prediction, group), members_of(label, group)
        counts.append(torch.stack([one.sum(within) for one in (predicted & expected, predicted, expected)]))
    return torch.stack(counts, 1)


def with_slices(score: CaseScore, counts: Sequence[Sequence[Sequence[int]]]) -> CaseScore:
    """The score of a case with the Dice of its slices, from `count_slices` as plain numbers.

    A slice counts for the classes that are in its label or its prediction, as a volume does: 0 for one that is in a single one.
    """
    classes = tuple(
        replace(one, slice_dices=tuple(2.0 * a / (b + c) for a, b, c in zip(*columns, strict=True) if b + c))
        for one, columns in zip(score.classes, zip(*counts, strict=True), strict=True)
    )
    return replace(score, classes=classes)


def slices_by_case(scores: Sequence[object], names: Sequence[str]) -> dict[str, SliceDices]:
    """Those of each case whose volume is cut into slices, by the classes' `names`; of others nothing."""
    records: dict[str, SliceDices] = {}
    for score in scores:
        if not isinstance(score, CaseScore):
            continue
        pairs = zip(names, score.classes, strict=True)
        found = {name: (fmean(one.slice_dices), len(one.slice_dices)) for name, one in pairs if one.slice_dices}
        if found:
            records[score.name] = found
    return records
