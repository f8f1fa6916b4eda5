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
    high = max(min(rate * _DECADE, _MOST_RATE), rate)
    yield "optimizer.learning_rate", _log(rate / _DECADE, high)
    if decay > 0:
        yield "optimizer.weight_decay", _log(decay / _DECADE, decay * _DECADE)
    if recipe.schedule.kind != "constant":
        yield "schedule.warmup", FloatRange(kind="float", low=0.0, high=0.3)


def _of_augmentation(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    """How often the techniques that the recipe has are used; which it has is the recipe's."""
    for name in type(recipe.augment).model_fields:
        technique = getattr(recipe.augment, name)
        if technique is not None and name != "flip" and hasattr(technique, "probability"):
            yield f"augment.{name}.probability", FloatRange(kind="float", low=0.0, high=0.6)


def _of_segmentation(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    yield "patch.foreground", FloatRange(kind="float", low=0.2, high=0.9)
    if getattr(recipe.network, "dropout", None) is not None:
        yield "network.dropout", FloatRange(kind="float", low=0.0, high=0.3)
    weights = [name for name in recipe.loss.weights if name != "dice_weight"]
    if "dice_weight" in recipe.loss.weights and weights:
        yield f"loss.{weights[0]}", FloatRange(kind="float", low=0.25, high=4.0, log=True)
    elif recipe.loss.kind == "tversky":
        yield "loss.beta", FloatRange(kind="float", low=0.3, high=0.9)


def _of_dose(recipe: Recipe) -> Iterator[tuple[str, Entry]]:
    yield "loss.kind", Choice(kind="categorical", choices=("masked_mae", "masked_mse"))


_OF_TASK: dict[str, Any] = {"segmentation": _of_segmentation, "dose": _of_dose}


def _log(low: float, high: float) -> FloatRange:
    return FloatRange(kind="float", low=float(f"{low:.3g}"), high=float(f"{high:.3g}"), log=True)
