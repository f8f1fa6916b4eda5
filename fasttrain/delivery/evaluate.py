"""Owns the scoring of a trained run on its validation or test cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from fasttrain.data.caches import open_case_source
from fasttrain.data.checking import Terms, check_cases, skipped_text
from fasttrain.data.finding import cases_for
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import Split, split_cases
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import Ensemble, WithinTold
from fasttrain.engine.validating.validation import Scores, Validator
from fasttrain.errors import DataError, RecipeError
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.limits import cpu_limit
from fasttrain.recipe import Recipe
from fasttrain.samples import Case


def evaluate(
    run: TrainedRun,
    part: Literal["validation", "test", "training"],
    data: Path | None,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    within: WithinTold | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Scores:
    """Scores the cases of a part of the run's split, as the run's own validation does; of those that it was trained on the scores
    say how well it fits them, and no more.

    data: the folder of the set where it is no longer where the run found it. within: hears of the windows of large cases.
    warn: hears which faulty cases are left out, where the recipe says so. Raises RecipeError where that part is empty, DataError
    with all faults of all its cases, Stopped where a stop was asked for.
    """
    recipe = run.recipe
    if isinstance(run.predictor, Ensemble) and part != "test":
        raise RecipeError(
            f"{run.folder.path} holds all folds, and each case was trained on by all networks but one; its summary.json has the "
            f"honest scores. Evaluate one fold ({run.folder.fold(0)}), or --part test"
        )
    root = data if data is not None else run.data_root
    found = cases_for(recipe.data, root)
    split = split_cases(found.every, recipe.data.split)
    cases = split.parts[part]
    if not cases:
        raise RecipeError(f"{run.folder.path}: data.split has no {part} cases")
    cases = _sound(cases, root, recipe, found.faults, stop, warn)
    source = open_case_source(
        "none", cases, Preprocess(recipe, training=False), cpu_limit(), lambda done, total: stop.check()
    )
    run.predictor.warn = warn
    validator = Validator(run.predictor, source, cases, recipe, keep_labels=False)
    try:
        with explaining(recipe):
            return validator.run(stop, progress, within)
    finally:
        validator.close()


def _sound(
    cases: tuple[Case, ...],
    root: Path,
    recipe: Recipe,
    pairing: Mapping[str, tuple[str, ...]],
    stop: StopRequest,
    warn: Callable[[str], None],
) -> tuple[Case, ...]:
    """Cases without faults, by the same check that training makes."""
    folder = own_cache_folder()
    # None of them trains, so that a part without foreground is no fault
    split, terms = Split((), cases), Terms.of_recipe(recipe)
    told = lambda done, total: stop.check()  # noqa: E731
    checked = check_cases(cases, root, terms, split, folder, cpu_limit(), told, pairing=pairing)
    left = tuple(case for case in cases if case.name not in checked.bad)
    if checked.faults and (recipe.data.bad_cases == "refuse" or not left):
        raise DataError(checked.faults)
    for warning in (*checked.notes, *skipped_text(checked.bad)):
        warn(warning)
    return left
