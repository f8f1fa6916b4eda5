"""Owns what another batch size or number of ranks changes besides: by `training.batch_policy` learning rate, passes, nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fasttrain.errors import RecipeError
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe, ResolvedRecipe

TUNED = "tuned"
"""The origin of a value that was measured."""


def possible_batch(recipe: Recipe, batch_size: int, ranks: int = 1) -> bool:
    """Whether the policy allows a batch size: with `keep_effective` those that the effective batch, of several ranks each one's
    share of it, is a multiple of.
    """
    training = recipe.training
    if training.batch_policy != "keep_effective":
        return True
    return (training.batch_size * training.accumulate) % (batch_size * ranks) == 0


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
    if training.batch_policy == "keep_effective":
        values["training", "accumulate"] = effective // batch_size
    else:
        values |= _scaled(recipe, growth)
    return resolved.with_values(values, origin)


def with_ranks(resolved: ResolvedRecipe, ranks: int, before: int = 1) -> ResolvedRecipe:
    """The recipe for so many ranks where it was for `before`: what `training.batch_policy` makes of the larger step, and
    `iterations_per_epoch` so that an epoch sees as many samples as it did.

    Raises RecipeError where `keep_effective` leaves a rank no whole number of patches.
    """
    training = resolved.recipe.training
    if ranks == before:
        return resolved
    values: dict[tuple[str | int, ...], Any] = {}
    growth = ranks / before
    if training.batch_policy == "keep_effective":
        effective = training.batch_size * training.accumulate * before
        if effective % ranks:
            raise RecipeError(
                f"training.batch_policy: keep_effective keeps {counted(effective, 'patch', 'patches')} a step, which {ranks} "
                "ranks cannot share evenly; take another number of ranks, or keep_lr, scale_linear or scale_sqrt"
            )
        of_one = effective // ranks
        batch = max(size for size in range(1, min(training.batch_size, of_one) + 1) if of_one % size == 0)
        values["training", "batch_size"], values["training", "accumulate"] = batch, of_one // batch
    else:
        if training.iterations_per_epoch is not None:
            values["training", "iterations_per_epoch"] = math.ceil(training.iterations_per_epoch / growth)
        values |= _scaled(resolved.recipe, growth)
    return resolved.with_values(values, f"{counted(ranks, 'rank')}, by training.batch_policy: {training.batch_policy}")


def told_of_ranks(before: ResolvedRecipe, after: ResolvedRecipe, ranks: int) -> str:
    """What more ranks change, in words."""
    then, now = before.recipe.training, after.recipe.training
    passes = f" × {now.accumulate} passes" if now.accumulate > 1 else ""
    rates = [one.recipe.optimizer.learning_rate for one in (before, after)]
    rate = f"stays at {rates[0]:g}" if rates[0] == rates[1] else f"{rates[0]:g} → {rates[1]:g}"
    told = (
        f"{ranks} ranks × {counted(now.batch_size, 'patch', 'patches')}{passes} = {ranks * now.batch_size * now.accumulate} a "
        f"step; the learning rate {rate} (training.batch_policy: {then.batch_policy})"
    )
    if then.iterations_per_epoch != now.iterations_per_epoch:
        told += f"; {then.iterations_per_epoch} → {now.iterations_per_epoch} steps an epoch, for as many samples"
    return told


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


def scaled_rate(recipe: Recipe, growth: float) -> float:
    """The learning rate for a step of `growth` times as many patches, by `training.batch_policy`."""
    policy, rate = recipe.training.batch_policy, recipe.optimizer.learning_rate
    if policy not in ("scale_linear", "scale_sqrt"):
        return rate
    return _rounded(rate * (growth if policy == "scale_linear" else math.sqrt(growth)))


def _scaled(recipe: Recipe, growth: float) -> dict[tuple[str | int, ...], Any]:
    """What is set for it: nothing where the rate stays the recipe's own."""
    rate = scaled_rate(recipe, growth)
    return {} if rate == recipe.optimizer.learning_rate else {("optimizer", "learning_rate"): rate}


def _rounded(value: float) -> float:
    """Six digits: what is written out should read as it was meant."""
    return float(f"{value:.6g}")
