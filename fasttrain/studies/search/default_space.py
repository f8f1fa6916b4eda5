"""Owns the space of a recipe that names none: what most often pays, round the recipe's own values, at the shapes that it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fasttrain.recipe import Recipe
from fasttrain.recipe.search_spec import Choice, FloatRange
from fasttrain.recipe.searched import Entry

_DECADE = 10.0
_MOST_RATE = 0.3


def default_space(recipe: Recipe) -> dict[str, Entry]:
    """{path: range}: optimisation for every task, and of a segmentation or a dose what its score hangs on.

    No shape changes, so that the plan, compiled code and preprocessed volumes hold for all trials.
    """
    found = dict(_of_optimisation(recipe))
    found |= dict(_of_augmentation(recipe))
    found |= dict(_OF_TASK[recipe.task](recipe))
    return found


def _of_optimisation(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    rate, decay = recipe.optimizer.learning_rate, recipe.optimizer.weight_decay
    yield (
        "optimizer.learning_rate",
        _round(rate, _short(rate / _DECADE), _short(min(rate * _DECADE, _MOST_RATE)), log=True),
    )
    if decay > 0:
        yield "optimizer.weight_decay", _round(decay, _short(decay / _DECADE), _short(decay * _DECADE), log=True)
    if recipe.schedule.kind != "constant":
        yield "schedule.warmup", _round(recipe.schedule.warmup, 0.0, 0.3)


def _of_augmentation(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    """How often the techniques that the recipe has are used; which it has is the recipe's."""
    for name in type(recipe.augment).model_fields:
        technique = getattr(recipe.augment, name)
        if technique is not None and name != "flip" and hasattr(technique, "probability"):
            yield f"augment.{name}.probability", _round(technique.probability, 0.0, 0.6)


def _of_segmentation(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    yield "patch.foreground", _round(recipe.patch.foreground, 0.2, 0.9)
    if (dropout := getattr(recipe.network, "dropout", None)) is not None:
        yield "network.dropout", _round(dropout, 0.0, 0.3)
    other = next((name for name in recipe.loss.weights if name != "dice_weight"), None)
    if "dice_weight" in recipe.loss.weights and other is not None:
        if (weight := getattr(recipe.loss, other)) > 0:
            yield f"loss.{other}", _round(weight, 0.25, 4.0, log=True)
    elif recipe.loss.kind == "tversky":
        yield "loss.beta", _round(recipe.loss.beta, 0.3, 0.9)


def _of_dose(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    yield "loss.kind", Choice(kind="categorical", choices=("masked_mae", "masked_mse"))


_OF_TASK: dict[str, Any] = {"segmentation": _of_segmentation, "dose": _of_dose}


def _round(own: float, low: float, high: float, log: bool = False) -> FloatRange:
    """From `low` to `high`, and as far as the recipe's own value lies."""
    return FloatRange(kind="float", low=min(low, own), high=max(high, own), log=log)


def _short(value: float) -> float:
    return float(f"{value:.3g}")
