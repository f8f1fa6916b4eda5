"""Owns the summary of scores over cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fasttrain.scoring.case_score import CaseScore


@dataclass(frozen=True)
class ScoreSummary:
    """Means over the cases that count; None where none does.

    `dice` and `hd95` (mm) are means over the foreground classes that have a counted case, each class by its own mean
    over cases. The dictionaries have an entry for every class name: `dice_counts` and `hd95_counts` say how many
    cases counted, `hd95_penalised` how many of those were scored with the volume's diagonal. `cases` is the number of
    cases in all. The dictionaries of slices are empty where volumes are not cut into slices; `slice_dice` is the mean over the
    classes, each by its own mean over all counted slices of all cases.
    """

    cases: int
    dice: float | None
    dice_by_class: dict[str, float | None]
    dice_counts: dict[str, int]
    background_dice: float | None
    hd95: float | None
    hd95_by_class: dict[str, float | None]
    hd95_counts: dict[str, int]
    hd95_penalised: dict[str, int]
    slice_dice: float | None = None
    slice_dice_by_class: dict[str, float | None] = field(default_factory=dict)
    slice_counts: dict[str, int] = field(default_factory=dict)


def summarise(scores: Sequence[CaseScore], class_names: Sequence[str]) -> ScoreSummary:
    """Summary of `scores`; `class_names` are the foreground classes in the order of their index.

    Raises ValueError where a case has another number of classes.
    """
    for score in scores:
        if len(score.classes) != len(class_names):
            raise ValueError(f"case {score.name} has {len(score.classes)} classes, {len(class_names)} are named")
    by_class = {name: [score.classes[index] for score in scores] for index, name in enumerate(class_names)}
    dices = {name: _counted(score.dice for score in column) for name, column in by_class.items()}
    distances = {name: _counted(score.hd95 for score in column) for name, column in by_class.items()}
    dice_by_class = {name: _mean(values) for name, values in dices.items()}
    hd95_by_class = {name: _mean(values) for name, values in distances.items()}
    slices = {name: [dice for score in column for dice in score.slice_dices] for name, column in by_class.items()}
    slice_dice_by_class = {name: _mean(values) for name, values in slices.items()} if any(slices.values()) else {}
    return ScoreSummary(
        cases=len(scores),
        dice=_mean(_counted(dice_by_class.values())),
        dice_by_class=dice_by_class,
        dice_counts={name: len(values) for name, values in dices.items()},
        background_dice=_mean(_counted(score.background_dice for score in scores)),
        hd95=_mean(_counted(hd95_by_class.values())),
        hd95_by_class=hd95_by_class,
        hd95_counts={name: len(values) for name, values in distances.items()},
        hd95_penalised={name: sum(score.hd95_penalised for score in column) for name, column in by_class.items()},
        slice_dice=_mean(_counted(slice_dice_by_class.values())),
        slice_dice_by_class=slice_dice_by_class,
        slice_counts={name: len(slices[name]) for name in slice_dice_by_class},
    )


def _counted(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
