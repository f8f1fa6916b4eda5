"""Owns what a score that no longer rises leads to: a lower learning rate (plateau), and the end of the run (early stopping)."""

from __future__ import annotations

from fasttrain.engine.state import Progress
from fasttrain.recipe.training_spec import EarlyStoppingSpec, PlateauSchedule


def lower_rate(spec: PlateauSchedule, progress: Progress, score: float) -> bool:
    """After a validation: multiplies `progress.rate_factor` where the patience is used up, and says whether it did.

    The rule of torch's ReduceLROnPlateau with mode `max` and an absolute threshold, but that it lowers after `patience`
    validations without a rise, not after one more.
    """
    if progress.plateau_best is None or score > progress.plateau_best + spec.threshold:
        progress.plateau_best, progress.plateau_waited = score, 0
        return False
    progress.plateau_waited += 1
    if progress.plateau_waited < spec.patience:
        return False
    progress.plateau_waited = 0
    former, progress.rate_factor = progress.rate_factor, max(progress.rate_factor * spec.factor, spec.least)
    return progress.rate_factor < former


def out_of_patience(spec: EarlyStoppingSpec, progress: Progress, score: float) -> bool:
    """After a validation: true where the run should end."""
    if progress.stopping_best is None or score > progress.stopping_best + spec.threshold:
        progress.stopping_best, progress.stopping_waited = score, 0
        return False
    progress.stopping_waited += 1
    return progress.stopping_waited >= spec.patience
