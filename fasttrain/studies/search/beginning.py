"""Owns the way from a recipe to a search that can begin: its space, machine and data looked at once, its storage opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.data.inventory import volumes_folder
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, FasttrainError, MachineError, OutOfMemoryError, RecipeError, StorageError
from fasttrain.machine.limits import disk_free_bytes
from fasttrain.recipe import ResolvedRecipe
from fasttrain.recipe.searched import keys_of
from fasttrain.studies.search.baseline import queue_baseline
from fasttrain.studies.search.choosing import grid_size, sampler_of, spread_seed
from fasttrain.studies.search.default_space import default_space
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.pool import Pool, Worker
from fasttrain.studies.search.processes import Presence, stale_callback
from fasttrain.studies.search.running import Search, Wanted
from fasttrain.studies.search.storage import network_warning, patiently
from fasttrain.studies.search.study import Study, note_wanted, open_new
from fasttrain.studies.search.study_folder import StudyFolder
from fasttrain.studies.search.told import Told
from fasttrain.studies.search.trial_recipe import base_recipe
from fasttrain.wording import counted

_ERRORS: dict[int, type[FasttrainError]] = {
    error.exit_code: error for error in (RecipeError, DataError, MachineError, OutOfMemoryError, StorageError)
}
_SHARE_OF_DISK = 0.5
"""Of the free disk, that the shared volumes may take."""
_KEPT_KINDS = ("auto", "memory", "gpu")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    name: str
    folder: Path
    storage: str | None
    data: Path | None
    device: str
    parallel: str | None
    hours: float | None


def with_space(resolved: ResolvedRecipe) -> tuple[ResolvedRecipe, str | None]:
    """The recipe that trials change, with the task's own space where it has none, and a sentence about that."""
    base = base_recipe(resolved)
    spec = base.recipe.search
    assert spec is not None
    if spec.space:
        return base, None
    space = default_space(base.recipe)
    values: dict[tuple[str | int, ...], Any] = {
        ("search", "space"): {path: entry.model_dump(mode="python") for path, entry in space.items()}
    }
    told = f"search.space is empty, so the space of the task {base.recipe.task} is searched: {', '.join(space)}"
    return base.with_values(values, "default"), told


def tell_overruled(resolved: ResolvedRecipe, tell: Callable[[Told], None]) -> None:
    """A warning for each value of the command line in whose place trials take one of the search section."""
    spec = resolved.recipe.search
    if spec is None:
        return
    pairs = (
        ("training.epochs", resolved.recipe.training.epochs, "search.epochs", spec.epochs),
        ("validation.every", resolved.recipe.validation.every, "search.validate_every", spec.validate_every),
    )
    for path, value, key, ours in pairs:
        if ours not in (None, value) and resolved.origins.get(keys_of(path)) == "--set":
            text = f"--set {path}={value} is not used: trials take {key}, which is {ours}; --set {key}={value} changes that"
            tell(Told(text, "warning"))


def read_parallel(text: str | None) -> int | None:
    """A number, or None for `auto`; raises RecipeError for anything else."""
    if text is None or text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise RecipeError(f"--parallel {text}: should be a number from 1 to 64, or auto")
    return int(text)


def open_study(base: ResolvedRecipe, asked: Asked, tell: Callable[[Told], None]) -> Study:
    """Raises RecipeError and StorageError as `open_new`."""
    spec = base.recipe.search
    assert spec is not None
    space, folder = dict(spec.space), StudyFolder(asked.folder)
    sampler = sampler_of(spec.sampler, space, spec.sampler.seed)
    study = open_new(folder, asked.name, asked.storage, base, space, sampler, stale_callback(spec.retries))
    if spec.sampler.seed is not None:
        before = len(patiently(study.place, lambda: study.optuna.get_trials(deepcopy=False)))
        others = len(list(folder.processes.glob("*.lock")))
        study.optuna.sampler = sampler_of(spec.sampler, space, spread_seed(spec.sampler.seed, before, others))
    for warning in (network_warning(study.place), _unknown_runs(study)):
        if warning is not None:
            tell(Told(warning, "warning"))
    queue_baseline(study, base, tell)
    if len(spec.objectives) > 1 and spec.pruner.kind != "none":
        tell(
            Told(
                "no trial is pruned: with several objectives nothing says which of two is worse (search.pruner is not used)"
            )
        )
    return study


def _unknown_runs(study: Study) -> str | None:
    """A sentence where runs lie in the folder of a study that knows no trial: its storage was emptied, or is another."""
    runs = len(list(study.folder.path.glob("trial-*")))
    trials = patiently(study.place, lambda: study.optuna.get_trials(deepcopy=False)) if runs else []
    waiting = require_optuna().trial.TrialState.WAITING
    if not runs or any(trial.state != waiting or "run" in trial.user_attrs for trial in trials):
        return None
    return (
        f"{study.place.shown} knows no trial of {study.name}, though its folder {study.folder.path} holds "
        f"{counted(runs, 'run')}: the search begins anew beside {'it' if runs == 1 else 'them'}"
    )


def trials_wanted(study: Study, asked: int | None, tell: Callable[[Told], None]) -> int:
    """As many as asked for, else as the recipe says; no more than a grid has."""
    count = asked or study.spec.trials
    grid = grid_size(study.spec, study.space)
    if grid is not None and grid < count:
        tell(Told(f"the grid has {grid} combinations: {grid} trials instead of {count}"))
        count = grid
    note_wanted(study.folder, count)
    return count


def looked_at(pool: Pool, base: ResolvedRecipe, asked: Asked) -> tuple[dict[str, Any], Worker]:
    """The machine and the data, by a worker that is then ready for the first trial. Raises what is wrong with them."""
    worker = pool.worker()
    task = {
        "look": True,
        "recipe": base.recipe.model_dump_json(),
        "data": None if asked.data is None else str(asked.data),
        "device": asked.device,
        "threads": None,
        "shares": None,
    }
    worker.lines.send({"task": task})
    found = worker.lines.next(None)
    if found is None:
        raise MachineError(f"the process that looks at the data has ended; {pool.logs} may say why")
    if found["looked"] is None:
        raise _ERRORS.get(int(found["exit_code"]), MachineError)(found["faults"])
    return dict(found["looked"]), worker


def search_of(
    study: Study,
    base: ResolvedRecipe,
    asked: Asked,
    trials: int,
    pool: Pool,
    stop: StopRequest,
    tell: Callable[[Told], None],
    began: float,
) -> Search:
    """The search, ready to run; from its beginning on others see that this process is at work on the study."""
    presence = Presence(study.folder)
    try:
        looked, worker = looked_at(pool, base, asked)
    except BaseException:
        presence.close()
        raise
    on_gpu = bool(looked["on_gpu"])
    parallel = read_parallel(asked.parallel or ("auto" if on_gpu else "1"))
    wanted = Wanted(
        base=base,
        data=asked.data,
        device=looked["device"] if asked.device == "auto" else asked.device,
        trials=trials,
        parallel=parallel,
        on_gpu=on_gpu,
        device_gib=looked["device_gib"],
        cpus=int(looked["cpus"]),
        shares=_shares(base, int(looked["cache_bytes"]), tell),
        hours=asked.hours,
        warm=worker,
    )
    return Search(study, wanted, pool, stop, tell, began, presence)


def _shares(base: ResolvedRecipe, cache_bytes: int, tell: Callable[[Told], None]) -> Path | None:
    """Where trials share their volumes; None where the recipe's kind of cache has a place of its own, or the disk no room."""
    cache = base.recipe.data.cache
    if cache.kind not in _KEPT_KINDS:
        return None
    folder = volumes_folder(cache, os.environ, Path("runs"))
    if cache_bytes > _SHARE_OF_DISK * disk_free_bytes(folder):
        tell(
            Told(f"{folder} has no room for the preprocessed volumes of all cases: each trial makes its own", "warning")
        )
        return None
    return folder
