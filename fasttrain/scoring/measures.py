"""Owns what is measured of a structure beside Dice and HD95: surface Dice and volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring.dice import Members, members_of
from fasttrain.scoring.surface_dice import surface_dice

_MM3_PER_ML = 1000.0


@dataclass(frozen=True)
class ClassMeasure:
    """One structure of one case. `surface_dice`: None where it is in neither volume, or was not asked for. Volumes in ml (of a
    plane, which has none, None).
    """

    surface_dice: float | None
    volume_ml: float | None
    predicted_ml: float | None

    @property
    def error_ml(self) -> float | None:
        """Predicted less labelled."""
        if self.volume_ml is None or self.predicted_ml is None:
            return None
        return self.predicted_ml - self.volume_ml

    @property
    def error_percent(self) -> float | None:
        """Of the labelled volume; None where there is none."""
        return None if not self.volume_ml or self.error_ml is None else 100.0 * self.error_ml / self.volume_ml


def measure_case(
    prediction: Tensor,
    label: Tensor,
    class_count: int,
    spacing_mm: Sequence[float],
    tolerance_mm: float | None,
    ignores: bool = False,
    regions: Members = (),
) -> tuple[ClassMeasure, ...]:
    """Measures of each foreground class, or region, of class indices [*spatial]; the arguments are those of `score_case`.

    tolerance_mm: None asks for no surface Dice. Voxels whose label is IGNORED are outside every structure.
    """
    if ignores:
        hidden = label == IGNORED
        prediction, label = prediction.masked_fill(hidden, 0), label.masked_fill(hidden, 0)
    voxel_ml = math.prod(spacing_mm) / _MM3_PER_ML if len(spacing_mm) == 3 else None
    measures = []
    for group in regions or [(index,) for index in range(1, class_count)]:
        predicted, expected = members_of(prediction, group), members_of(label, group)
        share = None if tolerance_mm is None else surface_dice(predicted, expected, spacing_mm, tolerance_mm)
        volumes = [None if voxel_ml is None else int(one.sum()) * voxel_ml for one in (expected, predicted)]
        measures.append(ClassMeasure(share, *volumes))
    return tuple(measures)
