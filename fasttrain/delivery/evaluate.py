"""Owns the scoring of a trained run on the cases of its split, or on those of another folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from fasttrain.data.caches import open_case_source
from fasttrain.data.checking import Terms, check_cases, skipped_text
from fasttrain.data.finding import cases_for
from fasttrain.data.layouts import look_at_layout
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import FoundCases
from fasttrain.data.splits import Split, split_cases
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import Ensemble, WithinTold
from fasttrain.engine.validating.validation import LookedAt, Scores, Validator
from fasttrain.errors import DataError, RecipeError
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.limits import cpu_limit
from fasttrain.recipe import Recipe
from fasttrain.samples import Case

Part = Literal["validation", "test", "training", "all"]


def evaluate(
    run: TrainedRun,
    part: Part,
    data: Path | None,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    within: WithinTold | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Scores:
    """Scores the cases of a part of the run's split, as the run's own validation does; of those that it was trained on the scores
    say how well it fits them, and no more.

    data: the folder of the set where it is no longer where the run found it; with `part` "all" it may be another set, of which
    every case is scored. within: hears of the windows of large cases. warn: hears which faulty cases are left out, where the
    recipe says so. Raises RecipeError where that part is empty, DataError with all faults of all its cases, Stopped where a stop
    was asked for.
    """
    with validator_of(run, part, data, stop, warn) as validator, explaining(run.recipe):
        return validator.run(stop, progress, within)


@contextlib.contextmanager
def validator_of(
    run: TrainedRun,
    part: Part,
    data: Path | None,
    stop: StopRequest,
    warn: Callable[[str], None],
    looked_at: LookedAt | None = None,
    surfaces: bool = False,
) -> Iterator[Validator]:
    """What predicts and scores the cases of `part`; see `evaluate`. surfaces: HD95 as well, whatever the recipe says."""
    recipe = run.recipe
    root = data if data is not None else run.data_root
    if isinstance(run.predictor, Ensemble) and part != "test" and root.resolve() == run.data_root.resolve():
        raise RecipeError(
            f"{run.folder.path} holds all folds, and each case was trained on by all networks but one; its summary.json has the "
            f"honest scores. Evaluate one fold ({run.folder.fold(0)}), --part test, or another set with --part all --data"
        )
    if part == "all":
        recipe, found = _every_case(recipe, root, warn)
        cases = found.every
    else:
        found = cases_for(recipe.data, root)
        cases = split_cases(found.every, recipe.data.split).parts[part]
    if not cases:
        raise RecipeError(f"{run.folder.path}: data.split has no {part} cases")
    cases = _sound(cases, root, recipe, found.faults, stop, warn)
    if surfaces and recipe.task != "dose":
        recipe = recipe.model_copy(update={"validation": recipe.validation.model_copy(update={"hd95": True})})
    source = open_case_source(
        "none", cases, Preprocess(recipe, training=False), cpu_limit(), lambda done, total: stop.check()
    )
    run.predictor.warn = warn
    validator = Validator(run.predictor, source, cases, recipe, keep_labels=False, looked_at=looked_at)
    try:
        yield validator
    finally:
        validator.close()


def _every_case(recipe: Recipe, root: Path, warn: Callable[[str], None]) -> tuple[Recipe, FoundCases]:
    """Every labelled case of a folder, which may have another layout than the one that was trained on."""
    try:
        return recipe, cases_for(recipe.data, root)
    except DataError as error:
        try:
            source = look_at_layout(root).source
            other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": source})})
            found = cases_for(other.data, root)
        except DataError:
            raise error from None
    warn(f"{root} is not laid out as the run's own set, and is read as {source.kind}")
    return other, found


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
