"""Owns what a recipe may say otherwise than it did when its run began, and why the rest may not be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fasttrain.engine.planning.batch_policy import scaled_rate, with_batch
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe, ResolvedRecipe

_COMPARABLE = "so that scores could no longer be compared with those of the run so far"
_LEARNT = "the network has learnt from cases prepared as they were"
_ORDER = "which cases come when hangs on it, so that some would be seen twice in an epoch and others not at all"
_RULES: dict[str, str | None] = {
    "": None,
    "name": "a run keeps its name; another folder for the data is named by --data",
    "task": "it is what the network was made for",
    "data": _LEARNT,
    "data.name": "another folder for the data is named by --data",
    "data.regions": "the network answers a channel a region, in their order",
    "data.source": None,  # the cases found are compared with those the run began with
    "data.split": "cases that were trained on would be scored",
    "data.bad_cases": None,
    "data.storage_dtype": None,
    "data.samples_per_case": _ORDER,
    "data.slices.keep_empty": _ORDER,
    "data.slices.neighbours": "the network's first layer has their channels",
    "data.cache": None,
    "data.cache.cache_share": _ORDER,
    "data.cache.cache_cases": _ORDER,
    "data.cache.replace_rate": _ORDER,
    "data.cache.shuffle_seed": _ORDER,
    "data.workers": None,
    "data.prefetch_factor": None,
    "data.worker_kind": None,
    "data.pin_memory": None,
    "data.copy_stream": None,
    "network": "the weights were trained in the network as it was",
    "network.dropout": None,
    "optimizer.kind": "its state is what the run has learnt of its steps, and another optimizer has another",
    "training.seed": "all draws hang on it, and those of the run so far were made with the former one",
    "validation.grid": f"it is where cases are scored, {_COMPARABLE}",
    "validation.hd95": "metrics.csv would need other columns",
}
"""By key, the longest that fits: why it stays as it was; None: it may change."""
_TABLES = (("data", "classes"), ("data", "label_map"), ("data", "regions"), ("network", "arguments"))
"""Tables whose keys are the user's."""


@dataclass(frozen=True)
class Change:
    """A value of the recipe that is another than before; None stands for a value that is not there as well."""

    keys: tuple[str, ...]
    before: Any
    after: Any

    @property
    def key(self) -> str:
        """The key as one writes it."""
        return ".".join(self.keys)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} → {_shown(self.after)}"


def as_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values for JSON."""
    return recipe.model_dump(mode="json")


def changes_between(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two recipes (`as_values`), leaf by leaf; of a section of another `kind` the kind alone."""
    found = list(_differing(then, now, ()))
    # Tables that differ in their order alone are equal, and the order of regions is that of the network's channels
    before, after = (dict(one.get("data", {}).get("regions") or {}) for one in (then, now))
    if before == after and list(before) != list(after):
        found.append(Change(("data", "regions"), before, after))
    return found


def _differing(then: Any, now: Any, keys: tuple[str, ...]) -> Iterator[Change]:
    if then == now:
        return
    if not isinstance(then, Mapping) or not isinstance(now, Mapping) or keys in _TABLES:
        yield Change(keys, then, now)
    elif then.get("kind") != now.get("kind"):
        yield Change((*keys, "kind"), then.get("kind"), now.get("kind"))
    else:
        # A key that the former recipe has not is one that fasttrain has learnt since
        for key in then:
            yield from _differing(then[key], now.get(key), (*keys, str(key)))


def assignments_for(changes: Sequence[Change], now: Mapping[str, Any]) -> dict[str, Any]:
    """What to set so that a recipe has these changes of `now`: a section of another kind as a whole."""
    found: dict[str, Any] = {}
    for change in changes:
        keys = change.keys[:-1] if change.keys[-1] == "kind" else change.keys
        value: Any = now
        for key in keys:
            value = value[key] if isinstance(value, Mapping) and key in value else None
        found[".".join(keys)] = value
    return found


def check_changes(changes: Sequence[Change], when: str) -> None:
    """Raises RecipeError with every change that a run cannot take up; `when` names where they came from, such as `--set`."""
    faults = [
        f"{when} {change.key}: a run that goes on keeps it at {_shown(change.before)}, found {_shown(change.after)}: {reason}; "
        "leave it as it was, or begin a new run with `fasttrain train`"
        for change in changes
        if (reason := _reason(change)) is not None
    ]
    if faults:
        raise RecipeError(faults)


def _reason(change: Change) -> str | None:
    if change.key == "data.cache.kind" and "smart" in (change.before, change.after):
        return f"smart goes through the cases in an order of its own: {_ORDER}"
    known = [".".join(change.keys[:count]) for count in range(len(change.keys), -1, -1)]
    return next(_RULES[key] for key in known if key in _RULES)


def changed_recipe(path: str, assignments: Sequence[str] | Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe of a run with what is set on its resume, and what `training.batch_policy` makes of another batch size where
    that is not set as well.
    """
    resolved = resolve(path, assignments)
    if not assignments:
        return resolved
    former = resolve(path).recipe
    before, now = former.training, resolved.recipe.training
    if now.batch_size == before.batch_size and now.accumulate == before.accumulate:
        return resolved
    given = _keys_of(assignments)
    if now.batch_policy == "keep_effective":
        if given & {"training", "training.accumulate"}:
            return resolved
        others = _without(assignments, "training.batch_size")
        return with_batch(resolve(path, others), now.batch_size, "--set, by training.batch_policy")
    growth = now.batch_size * now.accumulate / (before.batch_size * before.accumulate)
    if now.batch_policy == "keep_lr" or growth == 1 or given & {"optimizer", "optimizer.learning_rate"}:
        return resolved
    rate = scaled_rate(resolved.recipe, growth)
    return resolved.with_values({("optimizer", "learning_rate"): rate}, f"training.batch_policy: {now.batch_policy}")


def _keys_of(assignments: Sequence[str] | Mapping[str, Any]) -> set[str]:
    return {text.partition("=")[0].strip() for text in assignments}


def _without(assignments: Sequence[str] | Mapping[str, Any], key: str) -> list[str] | dict[str, Any]:
    if isinstance(assignments, Mapping):
        return {name: value for name, value in assignments.items() if name != key}
    return [text for text in assignments if text.partition("=")[0].strip() != key]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value}" if isinstance(value, int | str) else f"{value!r:.60}"
