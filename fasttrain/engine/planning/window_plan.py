"""Owns what the plan knows of `data.cache.kind: smart`: the windows of all ranks, what they hold and whether they come round."""

from __future__ import annotations

import math

from fasttrain.data.caches import Window
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.errors import RecipeError
from fasttrain.machine.hardware import Hardware
from fasttrain.recipe import Recipe
from fasttrain.wording import counted, size_in_memory


def held_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> int:
    """The most that the ranks of a machine hold, when an epoch's cases and the next one's replacements are there."""
    most = sum(sorted(window.most_in_memory for window in _windows(recipe, sizes))[-hardware.local_ranks :])
    return math.ceil(sizes.cache_bytes * most / max(sizes.training_cases, 1))


def comes_round(recipe: Recipe, sizes: Sizes) -> bool:
    """Whether every case is trained on once at least."""
    windows = _windows(recipe, sizes)
    return all(one.held and one.held + one.replaced * (sizes.epochs - 1) >= one.case_count for one in windows)


def window_text(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> str:
    """`8 of 16 cases in memory, about 3.6 GiB; 1 change after an epoch`."""
    windows = _windows(recipe, sizes)
    held, replaced = sum(one.held for one in windows), sum(one.replaced for one in windows)
    room = size_in_memory(held_bytes(recipe, hardware, sizes))
    parted = f", parted among {sizes.ranks} ranks" if sizes.ranks > 1 else ""
    return f"{held} of {counted(sizes.training_cases, 'case')} in memory{parted}, about {room}; {replaced} change after an epoch"


def check_parts(sizes: Sizes) -> None:
    """Raises RecipeError where there are not enough cases for each rank to have its own."""
    if sizes.training_cases < sizes.ranks:
        raise RecipeError(
            f"data.cache.kind: smart parts {counted(sizes.training_cases, 'training case')} among {sizes.ranks} ranks, and each "
            "needs one; train on fewer, or set data.cache.kind: memory (or disk)"
        )


def _windows(recipe: Recipe, sizes: Sizes) -> list[Window]:
    return Window.of_all(recipe.data.cache, sizes.training_cases, sizes.ranks)
