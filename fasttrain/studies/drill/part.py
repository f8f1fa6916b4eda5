"""Owns the part of a recipe that a drill trains: a few of its cases, short epochs, many checkpoints; all else as it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttrain.data.finding import cases_for
from fasttrain.data.location import data_root
from fasttrain.data.splits import Split, split_cases
from fasttrain.data.volume_files import files_of
from fasttrain.engine.planning.sizes import sizes_of
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.samples import Case
from fasttrain.studies.drill.shape import Shape

MOST_CASES = 6
"""So many cases train: enough for an order that a resume could get wrong, few enough to be read in no time."""


def part_of(recipe: Recipe, data: Path | None, shape: Shape) -> tuple[ResolvedRecipe, Path, int]:
    """The recipe of the part, the folder of its cases, and the steps that an epoch of the whole recipe has.

    Raises DataError and RecipeError as training the whole would.
    """
    root = data_root(recipe, data, os.environ)
    split = split_cases(cases_for(recipe.data, root).every, recipe.data.split)
    counts = (len(split.train), len(split.validation), len(split.test))
    values: dict[tuple[str | int, ...], Any] = {
        ("training", "epochs"): shape.epochs,
        ("training", "iterations_per_epoch"): shape.steps_per_epoch,
        ("training", "early_stopping"): None,
        ("validation", "every"): 1,
        ("output", "checkpoint_every"): shape.checkpoint_every,
        ("output", "keep_every"): 0,
        ("output", "log_every"): 1,
        ("output", "plots"): False,
        ("output", "pictures"): "off",
        ("output", "tensorboard"): False,
    }
    if recipe.acceleration.compile == "auto":
        # Worth its half minute for the run, not for a few steps of each of its lives
        values["acceleration", "compile"] = "off"
    if shape.amp is not None:
        # Measured once: another process might choose otherwise, and its losses would be others
        values["acceleration", "amp"] = shape.amp
        values["acceleration", "channels_last"] = "on" if shape.channels_last else "off"
        values["acceleration", "activation_checkpointing"] = "on" if shape.activation_checkpointing else "off"
    if (chosen := _few(split)) is not None:
        values["data", "split"] = {"kind": "lists", "train": chosen[0], "validation": chosen[1], "test": ()}
    whole = sizes_of(recipe, counts, 0).steps_per_epoch
    return ResolvedRecipe(recipe, {}, recipe.name).with_values(values, "drill"), root, whole


def _few(split: Split) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of cases that train and of the one that validates, the smallest file of them; None where there is one case alone."""
    one = min(split.validation, key=_file_bytes)
    train = [case for case in split.train if case.name != one.name]
    if not train:
        return None
    step = max(len(train) // MOST_CASES, 1)
    return _names(train[::step][:MOST_CASES]), (one.name,)


def _names(cases: Sequence[Case]) -> tuple[str, ...]:
    return tuple(case.name for case in cases)


def _file_bytes(case: Case) -> int:
    try:
        return sum(os.path.getsize(file) for path in case.images for file in files_of(path))
    except OSError:
        # The check of the cases has a sentence for it
        return 0
