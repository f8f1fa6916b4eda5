"""Owns what a run will do in numbers: cases, patches, steps, bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fasttrain.data.caches import Window
from fasttrain.recipe import Recipe


@dataclass(frozen=True)
class Sizes:
    """What a run will do, in numbers. `batch_size` is patches per forward pass and rank, `effective_batch` per optimiser step
    of all `ranks` together.

    `cache_bytes` are those of all preprocessed cases, `training_bytes` of those that train, `largest_case_bytes` of the
    largest that is validated, `build_bytes` what making the largest takes at its worst; 0: not known.
    """

    training_cases: int
    validation_cases: int
    test_cases: int
    samples_per_case: int
    batch_size: int
    accumulate: int
    effective_batch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    cache_bytes: int
    largest_case_bytes: int = 0
    build_bytes: int = 0
    training_bytes: int = 0
    ranks: int = 1


def sizes_of(
    recipe: Recipe,
    cases: tuple[int, int, int],
    cache_bytes: int,
    largest_case_bytes: int = 0,
    build_bytes: int = 0,
    training_bytes: int | None = None,
    ranks: int = 1,
) -> Sizes:
    """`cases`: training, validation and test cases; without `training_bytes` all that is kept may be for training.

    An epoch is a pass over the training cases in whole steps (the last one reaches into the next pass), or
    `training.iterations_per_epoch` steps; under `smart` a pass over the cases that it holds.
    """
    training, cache = recipe.training, recipe.data.cache
    effective = training.batch_size * training.accumulate * ranks
    in_a_pass = cases[0]
    if cache.kind == "smart":
        # As many samples for each rank, so that the one that holds most sees all it holds
        in_a_pass = ranks * max(window.held for window in Window.of_all(cache, cases[0], ranks))
    pass_length = in_a_pass * recipe.data.samples_per_case
    steps = training.iterations_per_epoch or math.ceil(pass_length / effective)
    return Sizes(
        training_cases=cases[0],
        validation_cases=cases[1],
        test_cases=cases[2],
        samples_per_case=recipe.data.samples_per_case,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
        effective_batch=effective,
        steps_per_epoch=steps,
        epochs=training.epochs,
        total_steps=steps * training.epochs,
        cache_bytes=cache_bytes,
        largest_case_bytes=largest_case_bytes,
        build_bytes=build_bytes,
        training_bytes=cache_bytes if training_bytes is None else training_bytes,
        ranks=ranks,
    )
