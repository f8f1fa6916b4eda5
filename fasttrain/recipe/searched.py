"""Owns how searched values are laid into a recipe, and what is wrong with a space: each end of each range is tried beforehand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fasttrain.recipe.faults import dotted, fields_at
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.search_spec import Choice, FloatRange, IntRange

if TYPE_CHECKING:
    from fasttrain.recipe.recipe import Recipe

Keys = tuple[str | int, ...]
Fault = tuple[Keys, str]
Entry = FloatRange | IntRange | Choice
Check = Callable[[dict[str, Any]], list[Fault]]
"""Takes a whole recipe as plain values; gives what is wrong with it."""
_MOST_CHOICES = 200
_INSIDE = 0.37
"""A place in a range that is no whole number where its ends are."""
_NOT_SEARCHED = {
    "name": "it names the run and its data",
    "task": "other tasks have other scores, which cannot be compared",
    "search": "it is the search itself",
    "output": "it changes no score",
    "data.split": "other cases would be scored, and scores could not be compared",
    "data.classes": "other classes have other scores",
    "data.regions": "other regions have other scores",
    "data.source": "other cases have other scores",
    "validation.grid": "it is where cases are scored, and scores could not be compared",
    "validation.every": "search.validate_every sets it for all trials",
    "training.epochs": "search.epochs sets it for all trials, which a pruner compares epoch by epoch",
}


def keys_of(path: str) -> Keys:
    """`patch.size[0]` or `patch.size.0` as keys."""
    parts = path.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isascii() and part.isdigit() and len(part) < 10 else part for part in parts)


def value_at(raw: Any, path: str) -> Any:
    """What a recipe's plain values have at a path; None where it leads nowhere, such as into a section that is null."""
    for key in keys_of(path):
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def active(space: Mapping[str, Entry], path: str, values: Mapping[str, Any]) -> bool:
    """Whether an entry is searched beside these values: all that its `when` names are there, and as it says."""
    return all(name in values and values[name] in _listed(wanted) for name, wanted in space[path].when.items())


def in_order(space: Mapping[str, Entry]) -> list[str]:
    """The entries, each behind those that its `when` names; those of a circle are left out."""
    found: list[str] = []
    while True:
        free = [path for path in space if path not in found and all(name in found for name in space[path].when)]
        if not free:
            return found
        found += free


def with_searched(raw: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with others at these paths.

    A section that is given another `kind` keeps the values that its new kind has as well. Raises KeyError, IndexError or
    TypeError where a path leads nowhere.
    """
    raw = copy.deepcopy(raw)
    for path, value in sorted(values.items(), key=lambda pair: keys_of(pair[0])[-1] != "kind"):
        keys = keys_of(path)
        node: Any = raw
        for key in keys[:-1]:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            elif isinstance(node, dict) and isinstance(node[key], tuple):
                node[key] = list(node[key])
            node = node[key]
        if keys[-1] == "kind" and node.get("kind") not in (None, value):
            _change_kind(raw, node, keys[:-1], value)
        elif isinstance(node, list):
            node[int(keys[-1])] = copy.deepcopy(value)
        else:
            node[keys[-1]] = copy.deepcopy(value)
    return raw


def _change_kind(raw: dict[str, Any], section: dict[str, Any], keys: Keys, kind: Any) -> None:
    from fasttrain.recipe.recipe import Recipe

    former = dict(section)
    section.clear()
    section["kind"] = kind
    known = fields_at(keys, raw, Recipe)
    section.update({key: value for key, value in former.items() if key in known and key != "kind"})


def faults_of_search(recipe: Recipe, check: Check) -> Iterator[Fault]:
    """What is wrong with the recipe's space; nothing is asked of a recipe without one."""
    if recipe.search is None or not recipe.search.space:
        return
    space = recipe.search.space
    named = list(_faults_of_names(recipe, space))
    yield from named
    raw = {**recipe.model_dump(mode="python"), "search": None}
    misnamed = {keys[2] for keys, _ in named}
    alone = list(_faults_alone(raw, {path: space[path] for path in space if path not in misnamed}, check))
    yield from alone
    if not named and not alone:
        base = _beside(space)
        for fault in _tried(raw, base, check):
            yield _at(fault, base)


def _faults_alone(raw: dict[str, Any], space: Mapping[str, Entry], check: Check) -> Iterator[Fault]:
    """Of each entry beside the recipe's own values, and what its `when` asks for."""
    told: set[tuple[str, Fault]] = set()
    for path in in_order(space):
        refused = False
        for value, key in tried_values(space[path]):
            if refused and key == "kind":
                # What is wrong at an end is mostly wrong between them, too
                continue
            values = {path: value}
            _satisfy(space, path, values)
            for fault in _tried(raw, values, check):
                refused = True
                if (path, fault) not in told:
                    told.add((path, fault))
                    where = "" if dotted(fault[0]) == path else f"{dotted(fault[0])}: "
                    yield ("search", "space", path, key), f"{_shown(value)} cannot be: {where}{fault[1]}"


def _tried(raw: dict[str, Any], values: Mapping[str, Any], check: Check) -> list[Fault]:
    try:
        return check(with_searched(raw, values))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        return [((), f"the space cannot be laid into the recipe ({type(error).__name__}: {error})")]


def _at(fault: Fault, values: Mapping[str, Any]) -> Fault:
    """The entry that a fault of all entries together most probably comes from."""
    named = dotted(fault[0])
    by = [
        path for path in values if named == path or named.startswith((f"{path}.", f"{path}[")) or path.startswith(named)
    ]
    where: Keys = ("search", "space", *by[:1])
    return where, f"the first values of the space give no recipe: {named}: {fault[1]}"


def _beside(space: Mapping[str, Entry]) -> dict[str, Any]:
    """The first value of each entry, of those that are searched together."""
    found: dict[str, Any] = {}
    for path in in_order(space):
        if active(space, path, found):
            found[path] = tried_values(space[path])[0][0]
    return found


def _satisfy(space: Mapping[str, Entry], path: str, values: dict[str, Any]) -> None:
    for name, wanted in space[path].when.items():
        values.setdefault(name, _listed(wanted)[0])
        _satisfy(space, name, values)


def tried_values(entry: Entry) -> list[tuple[Any, str]]:
    """(value, key of the entry) of both ends and then of one between, or of every choice."""
    if isinstance(entry, Choice):
        return [(choice, "choices") for choice in entry.choices]
    if isinstance(entry, IntRange) or entry.step is not None:
        return [(entry.low, "low"), (entry.high, "high")]
    return [(entry.low, "low"), (entry.high, "high"), (entry.low + _INSIDE * (entry.high - entry.low), "kind")]


def _faults_of_names(recipe: Recipe, space: Mapping[str, Entry]) -> Iterator[Fault]:
    known = set(_paths())
    for path, entry in space.items():
        place: Keys = ("search", "space", path)
        plain = ".".join(str(key) for key in keys_of(path) if isinstance(key, str))
        within = [key for key in _NOT_SEARCHED if plain == key or plain.startswith(f"{key}.")]
        if plain not in known and not any(plain.startswith(f"{one}.") for one in _TABLES):
            yield place, f"a recipe has no value of that name{did_you_mean(plain, known)}"
        elif within:
            yield place, f"{within[0]} cannot be searched: {_NOT_SEARCHED[within[0]]}"
        if isinstance(entry, Choice) and len(entry.choices) > _MOST_CHOICES:
            yield (*place, "choices"), f"has {len(entry.choices)} values; {_MOST_CHOICES} are the most"
        if isinstance(entry, Choice) and len({repr(choice) for choice in entry.choices}) != len(entry.choices):
            yield (*place, "choices"), "names one twice"
        yield from _faults_of_when(space, path, entry)
    circle = [path for path in space if path not in in_order(space)]
    if circle and all(name in space for path in circle for name in space[path].when):
        yield ("search", "space", circle[0], "when"), f"{' and '.join(circle)} wait for each other"
    for path in space:
        for other in space:
            if path != other and other.startswith((f"{path}.", f"{path}[")) and not path.endswith(".kind"):
                yield ("search", "space", other), f"lies in {path}, which is searched as a whole; leave one of them out"


_TABLES = ("network.arguments",)
"""Whose keys are those of a class of MONAI's."""


def _faults_of_when(space: Mapping[str, Entry], path: str, entry: Entry) -> Iterator[Fault]:
    place: Keys = ("search", "space", path, "when")
    for name, wanted in entry.when.items():
        if name not in space:
            yield place, f"names {name!r}, which is no entry of the space{did_you_mean(name, space)}"
            continue
        other = space[name]
        for value in _listed(wanted):
            if isinstance(other, Choice) and value not in other.choices:
                yield place, f"{name} is never {_shown(value)}; its choices are {', '.join(map(_shown, other.choices))}"
            elif not isinstance(other, Choice):
                yield place, f"{name} is a range; `when` asks for one of the choices of a categorical entry"


def _paths() -> list[str]:
    """Every path of a recipe's value or section, without the kinds that they belong to."""
    import re

    from fasttrain.recipe.reference import sections

    found = dict.fromkeys(
        re.sub(r"\[\w+\]", "", path)
        for one in sections()
        for path in (one.path, *(key.path for key in one.keys))
        if path
    )
    return list(found)


def _listed(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, list | tuple) else [wanted]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
