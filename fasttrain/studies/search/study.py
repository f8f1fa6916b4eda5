"""Owns a study as it lies in its folder and its storage: what it is bound to, how it is opened anew, and its trials by state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.engine.resuming.changes import as_values, changes_between
from fasttrain.errors import RecipeError, StorageError
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.recipe.search_spec import SearchSpec
from fasttrain.recipe.searched import Entry, keys_of
from fasttrain.studies.search.choosing import pruner_of
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.storage import Place, open_storage, patiently, place_of
from fasttrain.studies.search.study_folder import RECORD, StudyFolder
from fasttrain.whole_files import read_record, write_json, write_whole

FORMAT = 1
_KEYS = {"format": int, "name": str, "storage": str, "kind": str}
BOUND = "fasttrain_recipe"
"""Of the study's attributes: what no trial changes."""
BASELINE = "baseline"
"""Of a trial's attributes: it has the recipe's own values."""
SURPLUS = "surplus"
"""Of a trial's attributes: it was one too many."""
_FREE = ("output", "search.trials", "search.sampler", "search.pruner", "search.retries", "search.baseline")


@dataclass
class Study:
    """An opened study: Optuna's, its folder, its storage, its space."""

    folder: StudyFolder
    place: Place
    optuna: Any
    name: str
    spec: SearchSpec
    space: Mapping[str, Entry]
    recipe: Recipe

    @property
    def metric(self) -> str:
        """What is judged, in words."""
        return self.recipe.task_facts.metric_text

    def better(self, score: float, than: float | None) -> bool:
        """Whether a score is better."""
        return self.recipe.task_facts.better(score, than)


def bound_to(recipe: Recipe, space: Mapping[str, Entry]) -> dict[str, Any]:
    """What a study is bound to: the recipe without what its trials set, and without what changes no trial."""
    values = as_values(recipe)
    for path in [*_FREE, *space]:
        _drop(values, keys_of(path))
    values["search"] = {
        "objectives": values["search"]["objectives"],
        "space": {path: entry.model_dump(mode="json") for path, entry in space.items()},
    }
    return values


def _drop(values: Any, keys: Sequence[str | int]) -> None:
    for key in keys[:-1]:
        values = values.get(key) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(keys[-1], None)
        if keys[-1] == "kind":
            # Another kind has other keys, which are its trials' as well
            values.clear()


def open_new(
    folder: StudyFolder,
    name: str,
    asked: str | None,
    base: ResolvedRecipe,
    space: Mapping[str, Entry],
    sampler: Any,
    stale: Any,
) -> Study:
    """Begins the study, or takes up the one that is there.

    Raises RecipeError where that is bound to another recipe, with what differs; StorageError where its storage cannot be used.
    """
    optuna, spec = require_optuna(), base.recipe.search
    assert spec is not None
    folder.make()
    place = _place(folder, asked, name)
    _check_kept(folder, place)
    epochs = base.recipe.training.epochs
    storage = open_storage(place, stale)
    directions = [direction_of(one, base.recipe) for one in spec.objectives]
    several = len(directions) > 1
    settings: dict[str, Any] = {"directions": directions} if several else {"direction": directions[0]}
    found = patiently(
        place,
        lambda: optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=sampler,
            pruner=optuna.pruners.NopPruner()
            if several
            else pruner_of(spec.pruner, epochs, base.recipe.validation.every),
            load_if_exists=True,
            **settings,
        ),
    )
    bound = bound_to(base.recipe, space)
    attributes = patiently(place, lambda: found.user_attrs)
    if BOUND not in attributes:
        patiently(place, lambda: found.set_user_attr("fasttrain_metric", base.recipe.task_facts.metric_text))
        patiently(place, lambda: found.set_user_attr("fasttrain_objectives", list(spec.objectives)))
        # The last of them: a kill before it leaves nothing out
        patiently(place, lambda: found.set_user_attr(BOUND, bound))
    _check_bound(patiently(place, lambda: found.user_attrs)[BOUND], bound, name, folder)
    record = {"format": FORMAT, "name": name, "kind": place.kind, "storage": _kept(place, folder)}
    write_json(folder.record, {**record, "recipe": base.recipe.name, "trials": spec.trials, "source": base.source})
    with write_whole(folder.base) as stream:
        stream.write(base.as_yaml().encode())
    return Study(folder, place, found, name, spec, space, base.recipe)


def note_wanted(folder: StudyFolder, trials: int) -> None:
    """How many trials were asked for last, for whoever looks."""
    write_json(folder.record, {**_record(folder), "trials": trials})


def _record(folder: StudyFolder) -> dict[str, Any]:
    return read_record(folder.record, _KEYS, "bring it back, or name another --folder")


def _check_bound(then: Any, now: dict[str, Any], name: str, folder: StudyFolder) -> None:
    then, now = json.loads(json.dumps(then)), json.loads(json.dumps(now))
    changes = [str(change) for change in changes_between(then, now)]
    if changes:
        shown = "; ".join(changes[:4]) + (f"; and {len(changes) - 4} more" if len(changes) > 4 else "")
        raise RecipeError(
            f"study {name} in {folder.path} was begun with another recipe: {shown}; leave that as it was, or begin a study of "
            "another --name in another --folder"
        )


def _place(folder: StudyFolder, asked: str | None, name: str) -> Place:
    if not folder.holds_a_study():
        return place_of(asked, folder.path)
    known = _record(folder)
    if known["name"] != name:
        # Its trials are numbered from nought as well, and would lie in the other's folders
        raise RecipeError(
            f"--name {name}: {folder.path} holds study {known['name']}; go on with that by --name {known['name']}, or name "
            "another --folder"
        )
    former = _known_place(folder, known)
    if asked is None:
        return former
    place = place_of(asked, folder.path)
    if place.shown != former.shown:
        raise RecipeError(
            f"--storage {place.shown}: study {known['name']} in {folder.path} is stored in {former.shown}; leave --storage out, "
            "or name another --folder"
        )
    return place


def _check_kept(folder: StudyFolder, place: Place) -> None:
    """Raises StorageError where the study was begun and its file is gone: another one would not know what ran."""
    if folder.holds_a_study() and place.path is not None and not place.path.exists():
        name = _record(folder)["name"]
        raise StorageError(
            f"{place.path}, where study {name} is stored, is gone; bring it back, or name a new --folder to begin anew"
        )


def _kept(place: Place, folder: StudyFolder) -> str:
    """How the record names the storage: a file in the study's folder by its name, so that it can be moved; no password."""
    if place.path is not None and place.path.parent == folder.path.absolute():
        return place.path.name
    return place.shown


def _known_place(folder: StudyFolder, record: Mapping[str, Any]) -> Place:
    kept, kind = str(record["storage"]), str(record["kind"])
    if "/" in kept:
        return Place(kind, kept)
    path = folder.path.absolute() / kept
    return Place(kind, f"sqlite:///{path}" if kind == "sqlite" else str(path))


@dataclass(frozen=True)
class Kept:
    """A study that is only looked at."""

    folder: StudyFolder
    name: str
    place: Place
    optuna: Any
    record: dict[str, Any]


def open_kept(folder: StudyFolder, asked: str | None = None) -> Kept:
    """A study that was begun. Raises RecipeError where there is none, StorageError where its storage cannot be used."""
    optuna = require_optuna()
    if not folder.holds_a_study():
        raise RecipeError(f"{folder.path} holds no study (it has no {RECORD}); `fasttrain search run` begins one")
    record = _record(folder)
    place = _known_place(folder, record) if asked is None else place_of(asked, folder.path)
    _check_kept(folder, place)
    storage = open_storage(place)
    try:
        found = patiently(place, lambda: optuna.load_study(study_name=record["name"], storage=storage))
    except KeyError as error:
        raise StorageError(
            f"{place.shown} has no study {record['name']}; name another storage with --storage"
        ) from error
    return Kept(folder, record["name"], place, found, record)


def direction_of(objective: str, recipe: Recipe) -> str:
    """`maximize` or `minimize`."""
    rising = objective == "score" and not recipe.task_facts.lower_is_better
    return "maximize" if rising else "minimize"


def superseded(trials: Sequence[Any]) -> set[int]:
    """Numbers of the trials that died and were gone on with as another."""
    return {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}


def counted_trials(trials: Sequence[Any]) -> list[Any]:
    """Those that count: not what died and goes on as another, nor what was one too many.

    Machines that began a study at once each queued the recipe's own values: the trial that was queued first has them.
    """
    gone = superseded(trials)
    found = [trial for trial in trials if trial.number not in gone and not trial.user_attrs.get(SURPLUS)]
    own = sorted((trial for trial in found if trial.user_attrs.get(BASELINE)), key=_queued_as)
    second = {trial.number for trial in own[1:]}
    return [trial for trial in found if trial.number not in second]


def _queued_as(trial: Any) -> int:
    """A trial's first number, which it had before it died."""
    return min([trial.number, *trial.system_attrs.get("retry_history", ())])
