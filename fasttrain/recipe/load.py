"""Owns the way from a name or file and `--set` values to a checked recipe that knows where each value came from."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fasttrain.errors import RecipeError
from fasttrain.recipe import yaml_text
from fasttrain.recipe.bundled import SUFFIXES, bundled_recipes
from fasttrain.recipe.faults import dotted, sentences
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.recipe import Recipe, faults_across
from fasttrain.wording import counted

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class ResolvedRecipe:
    """A checked recipe, the text that gives it again, and the origin of each value by its path."""

    recipe: Recipe
    origins: dict[Keys, str]
    source: str

    def as_yaml(self) -> str:
        """The whole recipe, defaults written out, each value's origin beside it; reading it gives the same recipe."""
        heading = f"The recipe as it was used, from {self.source}; beside each value, where it came from."
        return yaml_text.write(self.recipe.model_dump(mode="python"), self.origins, heading)

    def with_values(self, values: Mapping[Keys, Any], origin: str) -> ResolvedRecipe:
        """The recipe with some of its values changed, by path; raises RecipeError where that makes it unsound."""
        raw, origins = self.recipe.model_dump(mode="python"), dict(self.origins)
        for keys, value in values.items():
            node: Any = raw
            for key in keys[:-1]:
                node = node[key]
            node[keys[-1]] = value
            origins[keys] = origin
        try:
            recipe = Recipe.model_validate(raw)
        except ValidationError as error:
            raise RecipeError([f"{dotted(path)}: {text}" for path, text in sentences(error, raw, Recipe)]) from error
        if faults := [f"{dotted(path)}: {text}" for path, text in faults_across(recipe)]:
            raise RecipeError(faults)
        return ResolvedRecipe(recipe, origins, self.source)


def find_recipe(name: str) -> Path:
    """The file of a bundled name or of a path; raises RecipeError with near names where there is none."""
    path = Path(name)
    if path.suffix in SUFFIXES or "/" in name:
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "does not exist"
            raise RecipeError(f"recipe file {name} {what}; `fasttrain recipes list` shows the bundled ones")
        return path
    bundled = bundled_recipes()
    if name not in bundled:
        raise RecipeError(f"there is no recipe {name!r}{did_you_mean(name, bundled)}")
    return bundled[name]


def resolve(name: str, assignments: Iterable[str] | Mapping[str, Any] = ()) -> ResolvedRecipe:
    """Reads a recipe, what it extends, and the assignments `key.path=value` (or a mapping of them); checks everything.

    Raises RecipeError with all faults found, each with file, line and path.
    """
    path = find_recipe(name)
    texts = _Texts()
    raw, origins = texts.read_with_parent(path)
    sets = _parsed(assignments)
    faults: list[str] = []
    for keys, value in sets:
        try:
            _assign(raw, origins, keys, value)
        except RecipeError as error:
            faults.extend(error.faults)
    if faults:
        raise RecipeError(faults)
    if not raw.get("name") and "name" not in raw:
        raw["name"] = path.stem
    recipe = _validated(raw, texts, {keys for keys, _ in sets})
    return ResolvedRecipe(recipe, _origins_of_all(recipe, origins), name)


class _Texts:
    """The files read for one recipe, kept to give faults their lines."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []

    def read(self, path: Path) -> dict[str, Any]:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(f"recipe file {path} is not UTF-8 text") from error
        except OSError as error:
            raise RecipeError(f"recipe file {path} cannot be read: {error.strerror}") from error
        raw = yaml_text.parse(text, str(path))
        if not isinstance(raw, dict):
            raise RecipeError(f"recipe file {path} should hold keys such as `data:` and `training:`, found {raw!r:.60}")
        self.texts.append((str(path), text))
        return raw

    def read_with_parent(self, path: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
        raw = self.read(path)
        parent_name = raw.pop("extends", None)
        origins: dict[Keys, str] = {}
        if parent_name is None:
            _note_origins(raw, (), "recipe", origins)
            return raw, origins
        if not isinstance(parent_name, str):
            raise RecipeError(f"{path}: extends: should be the name or file of a recipe, found {parent_name!r}")
        beside = path.parent / parent_name
        parent_path = beside if beside.is_file() else find_recipe(parent_name)
        parent = self.read(parent_path)
        if "extends" in parent:
            raise RecipeError(
                f"{path}: extends {parent_name}, which itself extends {parent['extends']}; one level is the limit, "
                f"so extend {parent['extends']} or copy {parent_name} with `fasttrain recipes copy`"
            )
        _note_origins(parent, (), f"extends {parent_name}", origins)
        _merge(parent, raw, (), "recipe", origins)
        return parent, origins

    def where(self, keys: Keys) -> str:
        """The file and line of a fault: those of the recipe that says most along that path, the child before its parent."""
        place, deepest = self.texts[0][0], 0
        for source, text in self.texts:
            found = yaml_text.line_of(text, keys)
            if found is not None and found[1] > deepest:
                place, deepest = f"{source}:{found[0]}", found[1]
        return place


def _note_origins(value: Any, path: Keys, origin: str, origins: dict[Keys, str]) -> None:
    origins[path] = origin
    if isinstance(value, dict):
        for key, item in value.items():
            _note_origins(item, (*path, key), origin, origins)


_WHOLE = (("data", "classes"), ("data", "label_map"), ("data", "regions"), ("search", "space"))
"""Tables whose keys are the user's: laid over each other they would mix two sets of labels."""


def _merge(base: dict[Any, Any], over: dict[Any, Any], path: Keys, origin: str, origins: dict[Keys, str]) -> None:
    """Lays `over` on `base`; a section whose `kind` changes is replaced whole, since its keys mean nothing to another, and so are
    the `arguments` of a network of another `name`.
    """
    renamed = over.get("name", base.get("name")) != base.get("name")
    for key, value in over.items():
        old = base.get(key)
        same_kind = (
            isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        if same_kind and not (renamed and key == "arguments") and (*path, key) not in _WHOLE:
            _merge(base[key], value, (*path, key), origin, origins)
        else:
            base[key] = copy.deepcopy(value)
            _forget(origins, (*path, key))
            _note_origins(value, (*path, key), origin, origins)


def _forget(origins: dict[Keys, str], path: Keys) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


def _parsed(assignments: Iterable[str] | Mapping[str, Any]) -> list[tuple[Keys, Any]]:
    pairs: list[tuple[Keys, Any]] = []
    faults = []
    if isinstance(assignments, Mapping):
        items = [(str(key), value) for key, value in assignments.items()]
        pairs = [(_keys(key), value) for key, value in items]
    else:
        for text in assignments:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                faults.append(f"--set {text}: should be key.path=value, for example training.epochs=20")
                continue
            try:
                pairs.append((_keys(key.strip()), yaml_text.parse(value, f"--set {text}")))
            except RecipeError as error:
                faults.extend(error.faults)
    if faults:
        raise RecipeError(faults)
    # A new kind empties its section, so it comes before the values that are set inside it.
    return sorted(pairs, key=lambda pair: pair[0][-1] != "kind")


def _keys(text: str) -> Keys:
    parts = text.replace("[", ".").replace("]", "").split(".")
    # No list is longer than nine digits say, and Python refuses to read a number of thousands
    return tuple(int(part) if part.isascii() and part.isdigit() and len(part) < 10 else part for part in parts)


def _assign(raw: dict[str, Any], origins: dict[Keys, str], keys: Keys, value: Any) -> None:
    node: Any = raw
    for depth, key in enumerate(keys[:-1]):
        if isinstance(node, list) and isinstance(key, int) and key < len(node):
            if not isinstance(node[key], dict | list):
                raise RecipeError(f"--set {dotted(keys)}: {dotted(keys[: depth + 1])} is one value, {node[key]!r}")
            node = node[key]
            # The origin of a list is written once, for all its values
            origins[keys[:depth]] = "--set"
            continue
        if isinstance(node, list):
            raise _no_such_place(keys, depth, node)
        if not isinstance(node.get(key), dict | list):
            node[key] = {}
        node = node[key]
    last = keys[-1]
    if isinstance(node, list):
        if not isinstance(last, int) or last >= len(node):
            raise _no_such_place(keys, len(keys) - 1, node)
    elif last == "kind" and node.get("kind") not in (None, value):
        node.clear()
        _forget(origins, keys[:-1])
    if isinstance(node, list):
        origins[keys[:-1]] = "--set"
    node[last] = copy.deepcopy(value)
    _forget(origins, keys)
    _note_origins(value, keys, "--set", origins)


def _no_such_place(keys: Keys, depth: int, values: list[Any]) -> RecipeError:
    return RecipeError(
        f"--set {dotted(keys)}: {dotted(keys[:depth])} is a list of {counted(len(values), 'value')}, the first of them [0]"
    )


def _validated(raw: dict[str, Any], texts: _Texts, set_paths: set[Keys]) -> Recipe:
    recipe: Recipe | None = None
    found = list(_no_text(raw, ()))
    if not found:
        try:
            recipe = Recipe.model_validate(raw)
            found = list(faults_across(recipe))
        except ValidationError as error:
            found = sentences(error, raw, Recipe)
    if recipe is not None and not found:
        return recipe

    def told(path: Keys, text: str) -> str:
        if any(path[: len(keys)] == keys or keys[: len(path)] == path for keys in set_paths):
            return f"--set {dotted(path)}: {text}"
        return f"{texts.where(path)}: {dotted(path)}: {text}"

    raise RecipeError(told(path, text) for path, text in found)


def _no_text(value: Any, path: Keys) -> Iterator[tuple[Keys, str]]:
    """Text that no file can hold: half a surrogate pair."""
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield path, f"{value!r} is no text that a file could hold"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _no_text(item, (*path, key))


def _origins_of_all(recipe: Recipe, origins: dict[Keys, str]) -> dict[Keys, str]:
    """An origin for each leaf of the whole recipe: `default` where nobody wrote it."""
    result: dict[Keys, str] = {}

    def visit(value: Any, path: Keys) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(item, (*path, key))
        else:
            result[path] = origins.get(path, "default")

    visit(recipe.model_dump(mode="python"), ())
    return result
