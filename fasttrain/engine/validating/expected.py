"""Owns how long a validation will take before one was measured, told in training steps."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrain.data.caches import estimate_shapes
from fasttrain.recipe import Recipe
from fasttrain.samples import Case
from fasttrain.windows import count_windows

_FORWARD_SHARE = 1 / 3
"""Of a training step: its backward pass computes twice what its forward pass does."""


def validation_in_steps(cases: Sequence[Case], recipe: Recipe) -> float:
    """The steps that compute as much as predicting all windows of `cases` does, every flip of `validation.mirror` counted.

    Scoring and reading are not in it. Reads the headers of the images.
    """
    validation, training = recipe.validation, recipe.training
    windows = sum(
        count_windows(shape, recipe.box, validation.window.overlap) for shape in estimate_shapes(cases, recipe)
    )
    passes = windows << len(validation.mirror)
    return passes * _FORWARD_SHARE / (training.batch_size * training.accumulate)
