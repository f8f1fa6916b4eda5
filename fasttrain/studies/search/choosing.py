"""Owns what chooses the trials' values and ends hopeless ones: Optuna's samplers and pruners by the names of the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fasttrain.errors import MachineError
from fasttrain.recipe.search_spec import Choice, IntRange, PrunerSpec, SamplerSpec, SearchSpec
from fasttrain.recipe.searched import Entry, active, in_order
from fasttrain.studies.search.extra import require_optuna
from fasttrain.telemetry.strict_json import dumps

_PLAIN = (str, int, float, bool, type(None))


def label_of(value: Any) -> Any:
    """A choice as a storage can hold it: text, a number or nothing as it is, a list or section as JSON."""
    return value if isinstance(value, _PLAIN) else dumps(value)


def suggested(trial: Any, space: Mapping[str, Entry]) -> dict[str, Any]:
    """{path: value} of the entries that this trial has, those behind their conditions left out where these do not hold."""
    values: dict[str, Any] = {}
    for path in in_order(space):
        if active(space, path, values):
            values[path] = _suggested(trial, path, space[path])
    return values


def _suggested(trial: Any, path: str, entry: Entry) -> Any:
    if isinstance(entry, Choice):
        labels = {repr(label_of(choice)): choice for choice in entry.choices}
        return labels[repr(trial.suggest_categorical(path, [label_of(choice) for choice in entry.choices]))]
    if isinstance(entry, IntRange):
        return trial.suggest_int(path, entry.low, entry.high, step=entry.step or 1, log=entry.log)
    drawn = trial.suggest_float(path, entry.low, entry.high, step=entry.step, log=entry.log)
    return min(max(rounded(drawn), entry.low), entry.high)


def rounded(value: Any) -> Any:
    """A number as a trial's recipe has it: digits that nobody could tell apart are noise there."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def grid_of(space: Mapping[str, Entry], points: int) -> dict[str, list[Any]]:
    """The values of each entry on a grid."""
    return {path: _on_grid(entry, points) for path, entry in space.items()}


def _on_grid(entry: Entry, points: int) -> list[Any]:
    if isinstance(entry, Choice):
        return [label_of(choice) for choice in entry.choices]
    if entry.step is not None:
        count = int((entry.high - entry.low) / entry.step + 1e-9) + 1
        return [type(entry.low)(entry.low + number * entry.step) for number in range(count)]
    low, high = (math.log(entry.low), math.log(entry.high)) if entry.log else (entry.low, entry.high)
    values = [low] if low == high else [low + (high - low) * number / (points - 1) for number in range(points)]
    drawn = [math.exp(value) for value in values] if entry.log else values
    if isinstance(entry, IntRange):
        return sorted({round(value) for value in drawn})
    return [min(max(float(f"{value:.6g}"), entry.low), entry.high) for value in drawn]


def grid_size(spec: SearchSpec, space: Mapping[str, Entry]) -> int | None:
    """How many trials a grid has; None for other samplers."""
    if spec.sampler.kind != "grid":
        return None
    return math.prod(len(values) for values in grid_of(space, spec.sampler.grid_points).values())


def sampler_of(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    """Raises MachineError where a sampler needs a package that is missing."""
    return _SAMPLERS[spec.kind](spec, space, seed)


def _tpe(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    samplers = require_optuna().samplers
    conditional = any(entry.when for entry in space.values())
    return samplers.TPESampler(
        n_startup_trials=spec.startup, multivariate=True, group=conditional, constant_liar=True, seed=seed
    )


def _random(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    return require_optuna().samplers.RandomSampler(seed=seed)


def _gp(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    return require_optuna().samplers.GPSampler(n_startup_trials=spec.startup, seed=seed)


def _cmaes(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    try:
        import cmaes  # noqa: F401
    except ImportError as error:
        text = "search.sampler.kind: cmaes needs a package that is not installed: pip install 'fasttrain[search]'"
        raise MachineError(text) from error
    return require_optuna().samplers.CmaEsSampler(
        n_startup_trials=spec.startup, seed=seed, warn_independent_sampling=False
    )


def _grid(spec: SamplerSpec, space: Mapping[str, Entry], seed: int | None) -> Any:
    optuna = require_optuna()

    class Grid(optuna.samplers.GridSampler):  # type: ignore[name-defined]
        def after_trial(self, *_: Any) -> None:
            """Optuna's would stop its own loop here; trials are counted elsewhere."""

    return Grid(grid_of(space, spec.grid_points), seed=seed)


_SAMPLERS: dict[str, Callable[[SamplerSpec, Mapping[str, Entry], int | None], Any]] = {
    "tpe": _tpe,
    "random": _random,
    "grid": _grid,
    "gp": _gp,
    "cmaes": _cmaes,
}


def pruner_of(spec: PrunerSpec, epochs: int, every: int = 1) -> Any:
    """Optuna's pruner, wrapped in the patient one where there is patience, which counts validations, `every` so many epochs."""
    pruners = require_optuna().pruners
    if spec.kind == "none":
        return pruners.NopPruner()
    if spec.kind == "hyperband":
        least = min(spec.min_epochs, epochs)
        inner = pruners.HyperbandPruner(min_resource=least, max_resource=epochs, reduction_factor=spec.factor)
    elif spec.kind == "halving":
        inner = pruners.SuccessiveHalvingPruner(min_resource=spec.min_epochs, reduction_factor=spec.factor)
    else:
        inner = pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=spec.min_epochs - 1)
    return pruners.PatientPruner(inner, patience=math.ceil(spec.patience / every)) if spec.patience else inner


def spread_seed(seed: int | None, *others: int) -> int | None:
    """A seed that no other process of the study has: with the same one two would draw the same values."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, *others]).generate_state(1)[0])
