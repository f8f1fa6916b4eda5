"""Owns how the progress of a run fits a plan whose steps or epochs have other sizes: samples seen carry on, not steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fasttrain.engine.optimisation.optim import LearningRate
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.engine.state import Progress


def known_since(progress: Progress, former: Mapping[str, Any], rate: LearningRate) -> None:
    """Fills in what checkpoints of earlier versions lack; former: the sizes in the plan of the run, whose batch never changed."""
    if progress.effective_batch:
        return
    progress.effective_batch, progress.epoch_steps = int(former["effective_batch"]), int(former["steps_per_epoch"])
    progress.epoch_first = progress.position - progress.step_in_epoch * progress.effective_batch
    progress.learning_rate = rate(max(progress.step - 1, 0)) * progress.rate_factor


def carry_on(progress: Progress, sizes: Sizes) -> None:
    """Brings the progress into the steps of a plan.

    The open epoch ends at the very sample where it would have ended, so that it too is one pass over the cases; where the samples
    that are left to it are no multiple of the new step, the next step takes the odd ones. The schedule goes on at the place that
    the closed epochs and the rest of the open one give, of the steps that the whole run has by the plan.
    """
    batch, steps = sizes.effective_batch, sizes.steps_per_epoch
    if progress.step_in_epoch == 0:
        progress.epoch_steps, progress.short_samples = steps, 0
    elif batch != progress.effective_batch:
        left = samples_left(progress)
        progress.epoch_steps = progress.step_in_epoch + math.ceil(left / batch)
        progress.short_samples = left % batch
    progress.effective_batch = batch
    still = progress.epoch_steps - progress.step_in_epoch
    progress.schedule_shift = (progress.epoch + 1) * steps - still - progress.step


def samples_left(progress: Progress) -> int:
    """Of the open epoch."""
    steps = progress.epoch_steps - progress.step_in_epoch
    missing = progress.effective_batch - progress.short_samples if progress.short_samples else 0
    return steps * progress.effective_batch - missing
