"""Owns the trial that a search begins with: the recipe's own values, so that the best is never worse than those."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fasttrain.errors import RecipeError
from fasttrain.recipe import ResolvedRecipe
from fasttrain.recipe.search_spec import Choice, FloatRange, IntRange
from fasttrain.recipe.searched import Entry, active, in_order, value_at
from fasttrain.studies.search.choosing import label_of
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.storage import patiently
from fasttrain.studies.search.study import BASELINE, SURPLUS, Study
from fasttrain.studies.search.taking import taking
from fasttrain.studies.search.told import Told
from fasttrain.studies.search.trial_recipe import trial_recipe

_STEP_SLACK = 1e-8
"""Of a step, by which a value may lie beside it; as in Optuna's distributions."""


def queue_baseline(study: Study, base: ResolvedRecipe, tell: Callable[[Told], None]) -> None:
    """Queues the recipe's own values as the first trial of a study that has none, unless `search.baseline` is off.

    A grid has its own trials. Where a value lies outside of its range no trial is queued, and `tell` is told. What a search that
    ended before its first trial had queued, of a recipe that was changed since, is taken back. Raises StorageError.
    """
    wanted = study.spec.baseline and study.spec.sampler.kind != "grid"
    values, outside = own_values(base, study.space) if wanted else ({}, [])
    params = {path: label_of(value) for path, value in values.items()} if wanted and not outside else None
    with taking(study.place):
        trials = patiently(study.place, lambda: study.optuna.get_trials(deepcopy=False))
        other = [trial for trial in trials if _waits(trial) and trial.system_attrs.get("fixed_params") != params]
        for trial in other:
            patiently(study.place, partial(_take_back, study, trial))
        if len(trials) > len(other):
            return
        if params is not None:
            patiently(study.place, lambda: study.optuna.enqueue_trial(params, user_attrs={BASELINE: True}))
        elif outside:
            lies = "lies" if len(outside) == 1 else "lie"
            text = f"no trial has the recipe's own values: {', '.join(outside)} {lies} outside of search.space there"
            tell(Told(text))


def _waits(trial: Any) -> bool:
    """Whether a trial of the recipe's own values was queued, and has never run."""
    waiting = trial.state == require_optuna().trial.TrialState.WAITING
    return waiting and bool(trial.user_attrs.get(BASELINE)) and "run" not in trial.user_attrs


def _take_back(study: Study, trial: Any) -> None:
    optuna, storage = require_optuna(), study.optuna._storage
    # Another machine may have begun it, or taken it back, meanwhile
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        storage.set_trial_user_attr(trial._trial_id, SURPLUS, True)
        storage.set_trial_state_values(trial._trial_id, state=optuna.trial.TrialState.FAIL)


def own_values(base: ResolvedRecipe, space: Mapping[str, Entry]) -> tuple[dict[str, Any], list[str]]:
    """The recipe's own values by path, of the entries that are searched beside these; and the paths whose own value no trial can
    have.
    """
    raw = base.recipe.model_dump(mode="python")
    values: dict[str, Any] = {}
    outside = []
    for path in in_order(space):
        if not active(space, path, values):
            continue
        entry = space[path]
        found = _same(base, path, entry, values) if isinstance(entry, Choice) else _within(value_at(raw, path), entry)
        if found:
            values[path] = found[0]
        else:
            outside.append(path)
    return values, outside


def _same(base: ResolvedRecipe, path: str, entry: Choice, beside: Mapping[str, Any]) -> list[Any]:
    """The choice that leaves the recipe as it is, which may be written in another way there; [] where there is none."""
    own = {**base.recipe.model_dump(mode="python"), "search": None}
    for choice in entry.choices:
        try:
            tried = trial_recipe(base, {**beside, path: choice}, "").recipe
        except RecipeError:
            continue
        if tried.model_dump(mode="python") == own:
            return [choice]
    return []


def _within(value: Any, entry: FloatRange | IntRange) -> list[Any]:
    """The value as the range has it; [] where it lies outside, or between two steps."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not entry.low <= value <= entry.high:
        return []
    if isinstance(entry, IntRange) and value != int(value):
        return []
    if entry.step is not None:
        steps = (value - entry.low) / entry.step
        if abs(steps - round(steps)) > _STEP_SLACK:
            return []
    return [int(value) if isinstance(entry, IntRange) else float(value)]
