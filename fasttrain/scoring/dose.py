"""Owns the scores of a predicted dose: those of the OpenKBP challenge, by its own definitions.

Babier et al., Med Phys 48:5549 (2021), and the challenge's published evaluation. A prediction counts inside the possible dose
mask alone, as submissions were cut to it; structures that reach outside have a dose of 0 there, in prediction and reference
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fasttrain.recipe.task import is_target

TENTH_OF_CC_MM3 = 100.0


@dataclass(frozen=True)
class DoseScore:
    """Scores of one case in Gy.

    dose_score: mean absolute error over the possible dose mask. metrics: (reference, prediction) by structure and metric: of an
    organ `D0.1cc` and `mean`, of a target `D99`, `D95` and `D1`; a structure that is absent has none.
    """

    name: str
    dose_score: float
    metrics: dict[str, dict[str, tuple[float, float]]]

    @property
    def errors(self) -> dict[str, list[float]]:
        """Absolute differences of the metrics by structure."""
        return {
            structure: [abs(expected - found) for expected, found in pairs.values()]
            for structure, pairs in self.metrics.items()
        }

    @property
    def dvh_score(self) -> float | None:
        """The mean over all metrics of the case; None where it has no structure."""
        return _mean([error for errors in self.errors.values() for error in errors])


@dataclass(frozen=True)
class DoseSummary:
    """Scores over cases in Gy, None where nothing counts. dose_score: the mean over cases; dvh_score: over all metrics of all
    cases, as the challenge takes it; dvh_by_structure: the same of one structure, in `counts` cases.
    """

    cases: int
    dose_score: float | None
    dvh_score: float | None
    dvh_by_structure: dict[str, float | None]
    counts: dict[str, int]


def score_dose(
    name: str,
    prediction: np.ndarray,
    reference: np.ndarray,
    bits: np.ndarray,
    structures: Sequence[str],
    spacing_mm: Sequence[float],
) -> DoseScore:
    """Scores a dose in Gy against the reference, both [*spatial]; bit n of `bits` is set inside structure n, the one after the
    last inside the possible dose mask. Raises ValueError where shapes differ or the mask is empty.
    """
    if not prediction.shape == reference.shape == bits.shape:
        raise ValueError(
            f"prediction {prediction.shape}, reference {reference.shape} and structures {bits.shape} differ in shape"
        )
    # Of a volume that is mostly air the few voxels in which anything lies
    there = np.flatnonzero(bits)
    prediction, reference, bits = (volume.reshape(-1)[there] for volume in (prediction, reference, bits))
    possible = (bits >> len(structures)) & 1 == 1
    if not possible.any():
        raise ValueError(f"case {name} has no voxel in its possible dose mask")
    found = np.where(possible, prediction, 0).astype(np.float64)
    expected = np.where(possible, reference, 0).astype(np.float64)
    error = float(np.abs(found - expected).sum() / np.count_nonzero(possible))
    metrics = {}
    for bit, structure in enumerate(structures):
        inside = (bits >> bit) & 1 == 1
        if inside.any():
            before, after = (dose_metrics(dose[inside], is_target(structure), spacing_mm) for dose in (expected, found))
            metrics[structure] = {metric: (before[metric], after[metric]) for metric in before}
    return DoseScore(name, error, metrics)


def dose_metrics(doses: np.ndarray, target: bool, spacing_mm: Sequence[float]) -> dict[str, float]:
    """The challenge's metrics of a structure from the doses [n] of its voxels.

    D0.1cc is the dose that the hottest tenth of a cubic centimetre gets at least, counted in whole voxels, at least one; Dx
    what x% of the target get at least. Percentiles are interpolated linearly.
    """
    if target:
        return {f"D{share}": float(np.percentile(doses, 100 - share)) for share in (99, 95, 1)}
    voxels = max(1.0, float(np.round(TENTH_OF_CC_MM3 / np.prod(spacing_mm))))
    # A structure smaller than that: its least dose
    share = max(100.0 - 100.0 * voxels / doses.size, 0.0)
    return {"D0.1cc": float(np.percentile(doses, share)), "mean": float(doses.mean())}


def summarise_doses(scores: Sequence[DoseScore], structures: Sequence[str]) -> DoseSummary:
    """The summary of `scores`."""
    every: Mapping[str, list[list[float]]] = {
        structure: [score.errors[structure] for score in scores if structure in score.metrics]
        for structure in structures
    }
    pooled = {structure: [one for errors in found for one in errors] for structure, found in every.items()}
    return DoseSummary(
        cases=len(scores),
        dose_score=_mean([score.dose_score for score in scores]),
        dvh_score=_mean([one for errors in pooled.values() for one in errors]),
        dvh_by_structure={structure: _mean(errors) for structure, errors in pooled.items()},
        counts={structure: len(found) for structure, found in every.items()},
    )


def dose_volume_curve(doses: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The share of a structure's voxels, whose doses are [n], that gets at least each dose of `at` [k], in percent."""
    ordered = np.sort(doses)
    return 100.0 * (1.0 - np.searchsorted(ordered, at, side="left") / max(len(ordered), 1))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
