"""Owns the scoring of a trained run on its validation or test cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.data.splits import split_cases
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.inference import Ensemble, WithinTold
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validation import Scores, Validator
from fasttrain.errors import RecipeError
from fasttrain.machine.limits import cpu_limit


def evaluate(
    run: TrainedRun,
    part: Literal["validation", "test"],
    data: Path | None,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    within: WithinTold | None = None,
) -> Scores:
    """Scores the cases of a part of the run's split, as the run's own validation does.

    data: the folder of the set where it is no longer where the run found it. within: hears of the windows of large cases. Raises
    RecipeError where that part is empty, DataError for faulty cases, Stopped where a stop was asked for.
    """
    recipe = run.recipe
    if isinstance(run.predictor, Ensemble) and part == "validation":
        raise RecipeError(
            f"{run.folder.path} holds all folds, and each case was trained on by all networks but one; its summary.json has the "
            f"honest scores. Evaluate one fold ({run.folder.fold(0)}), or --part test"
        )
    found = find_cases(recipe.data, data if data is not None else run.data_root)
    split = split_cases(found.cases, recipe.data.split)
    cases = split.validation if part == "validation" else split.test
    if not cases:
        raise RecipeError(f"{run.folder.path}: data.split has no {part} cases")
    source = open_case_source(
        "none", cases, Preprocess(recipe, training=False), cpu_limit(), lambda done, total: stop.check()
    )
    validator = Validator(run.predictor, source, cases, recipe, keep_labels=False)
    try:
        with explaining(recipe):
            return validator.run(stop, progress, within)
    finally:
        validator.close()
