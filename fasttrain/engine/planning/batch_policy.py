"""Owns what another batch size changes besides, by `training.batch_policy`: the learning rate, the passes a step, nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fasttrain.errors import RecipeError

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe, ResolvedRecipe

TUNED = "tuned"
"""The origin of a value that was measured."""


def possible_batch(recipe: Recipe, batch_size: int) -> bool:
    """Whether the policy allows a batch size: with `keep_effective` those that the effective batch is a multiple of."""
    training = recipe.training
    return training.batch_policy != "keep_effective" or (training.batch_size * training.accumulate) % batch_size == 0


def with_batch(resolved: ResolvedRecipe, batch_size: int, origin: str = TUNED) -> ResolvedRecipe:
    """The recipe with another batch size and with what its policy makes of that.

    Raises RecipeError where `keep_effective` leaves no whole number of passes.
    """
    recipe = resolved.recipe
    training = recipe.training
    if batch_size == training.batch_size:
        return resolved
    effective = training.batch_size * training.accumulate
    if not possible_batch(recipe, batch_size):
        raise RecipeError(
            f"training.batch_size {batch_size}: training.batch_policy: keep_effective keeps {effective} patches a step, which is "
            f"no multiple of {batch_size}"
        )
    values: dict[tuple[str | int, ...], Any] = {("training", "batch_size"): batch_size}
    growth = batch_size / training.batch_size
    rate = recipe.optimizer.learning_rate
    if training.batch_policy == "keep_effective":
        values["training", "accumulate"] = effective // batch_size
    elif training.batch_policy == "scale_linear":
        values["optimizer", "learning_rate"] = _rounded(rate * growth)
    elif training.batch_policy == "scale_sqrt":
        values["optimizer", "learning_rate"] = _rounded(rate * math.sqrt(growth))
    return resolved.with_values(values, origin)


def stepped_down(resolved: ResolvedRecipe) -> ResolvedRecipe | None:
    """The recipe with the next smaller batch size that leaves the effective batch as it is, by more passes a step; None where a
    pass is one patch already. Halved where that is whole, so that little of the speed is lost.
    """
    training = resolved.recipe.training
    if training.batch_size == 1:
        return None
    parts = next(count for count in range(2, training.batch_size + 1) if training.batch_size % count == 0)
    values: dict[tuple[str | int, ...], Any] = {
        ("training", "batch_size"): training.batch_size // parts,
        ("training", "accumulate"): training.accumulate * parts,
    }
    try:
        return resolved.with_values(values, "stepped down, out of memory")
    except RecipeError:
        # Such as a batch norm of one voxel a patch, which needs two patches
        return None


def _rounded(value: float) -> float:
    """Six digits: what is written out should read as it was meant."""
    return float(f"{value:.6g}")
