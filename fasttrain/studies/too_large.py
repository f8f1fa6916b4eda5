"""Owns what is told where not even one patch fits: an estimate, and settings that were tried and do fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fasttrain.errors import OutOfMemoryError, RecipeError
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.studies.task import Outcome
from fasttrain.wording import size_in_memory

_SHRINKS = 4
Try = Callable[[ResolvedRecipe], Outcome]
"""Runs a trial of a recipe's steps."""


def nothing_fits(
    resolved: ResolvedRecipe, attempt: Try, device_name: str, free_bytes: int | None, fault: str = ""
) -> OutOfMemoryError:
    """The error, once smaller patches and other settings were tried, until two fit. `resolved` has a batch size of 1; fault: how
    the trial of it told that memory ran out.
    """
    recipe = resolved.recipe
    size = list(recipe.patch.size)
    free = f" into the {size_in_memory(free_bytes)} that {device_name} has free" if free_bytes else f" on {device_name}"
    told = f"not even a batch of 1 patch of {size} fits{free}"
    found: list[str] = []
    patches = list(smaller_patches(recipe))
    for patch in patches:
        outcome = attempt(resolved.with_values({("patch", "size"): patch}, "tried"))
        if outcome.done:
            found.append(f"patch.size=[{','.join(map(str, patch))}]")
            told += _estimate(outcome.values, patch, recipe)
            break
    if patches and not found:
        # A step of next to nothing did not fit either: something else takes the memory, and the trial knows what
        return OutOfMemoryError(f"{told}, nor does a much smaller patch: {fault or 'take a machine with more memory'}")
    for key, value in _other_settings(recipe):
        if len(found) < 2 and _fits(resolved, key, value, attempt):
            shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
            found.append(f"{key}={shown}")
    smaller_network = "take a smaller network, or a machine with more memory"
    if len(found) == 2:
        return OutOfMemoryError(f"{told}; either of these fits, as measured: {found[0]}, or {found[1]}")
    if found:
        return OutOfMemoryError(f"{told}; this fits, as measured: {found[0]}; else {smaller_network}")
    return OutOfMemoryError(f"{told}; {smaller_network}")


def _fits(resolved: ResolvedRecipe, key: str, value: Any, attempt: Try) -> bool:
    setting: dict[tuple[str | int, ...], Any] = {tuple(key.split(".")): value}
    try:
        return attempt(resolved.with_values(setting, "tried")).done
    except RecipeError:
        # Such as a group norm that wants more features
        return False


def _other_settings(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """What else makes a step smaller, that which changes least of the training first."""
    if recipe.acceleration.activation_checkpointing == "auto":
        yield "acceleration.activation_checkpointing", "on"
    if recipe.acceleration.amp == "off":
        yield "acceleration.amp", "auto"
    features = getattr(recipe.network, "features", None)
    if features and min(features) >= 2:
        yield "network.features", [count // 2 for count in features]


def smaller_patches(recipe: Recipe) -> Iterator[tuple[int, ...]]:
    """Of about half of the voxels, a quarter and so on: the longest axis is shortened by what the network divides it by."""
    factors, patch = recipe.network.downsampling(recipe.dimensions), list(recipe.patch.size)
    for _ in range(_SHRINKS):
        wanted = math.prod(patch) / 2
        while math.prod(patch) > wanted:
            able = [axis for axis, length in enumerate(patch) if length >= 3 * factors[axis]]
            if not able:
                return
            longest = max(able, key=lambda axis: patch[axis])
            patch[longest] -= factors[longest]
        yield tuple(patch)


def _estimate(values: dict[str, Any], patch: tuple[int, ...], recipe: Recipe) -> str:
    """By the voxels, which errs upwards by what weights take."""
    held = values.get("reserved_bytes")
    if not held:
        return ""
    needed = held * math.prod(recipe.patch.size) / math.prod(patch)
    return f": {list(patch)} held {size_in_memory(held)}, so it would hold up to {size_in_memory(needed)}"
