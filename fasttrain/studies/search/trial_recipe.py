"""Owns the recipe of one trial: the study's own with the trial's values, each of which says where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fasttrain.errors import RecipeError
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.recipe.faults import dotted, sentences
from fasttrain.recipe.recipe import faults_across
from fasttrain.recipe.search_spec import SearchSpec
from fasttrain.recipe.searched import keys_of, with_searched


def base_recipe(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """The recipe that trials change: with a `search` section, and with its epochs and its distance of validations."""
    spec = resolved.recipe.search or SearchSpec()
    values: dict[tuple[str | int, ...], Any] = {("search",): spec.model_dump(mode="python")}
    if spec.epochs is not None:
        values["training", "epochs"] = spec.epochs
    if spec.validate_every is not None:
        values["validation", "every"] = spec.validate_every
    return resolved.with_values(values, "search")


def trial_recipe(base: ResolvedRecipe, values: Mapping[str, Any], name: str) -> ResolvedRecipe:
    """Raises RecipeError where the values together make no recipe."""
    raw = with_searched({**base.recipe.model_dump(mode="python"), "search": None}, values)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError([f"{dotted(path)}: {text}" for path, text in sentences(error, raw, Recipe)]) from error
    if faults := [f"{dotted(path)}: {text}" for path, text in faults_across(recipe)]:
        raise RecipeError(faults)
    searched = [keys_of(path) for path in values]
    origins = {keys: origin for keys, origin in base.origins.items() if keys[0] != "search"}
    for keys in _leaves(recipe.model_dump(mode="python"), ()):
        if any(keys[: len(path)] == path for path in searched):
            origins[keys] = name
        else:
            origins.setdefault(keys, "default")
    return ResolvedRecipe(recipe, origins, base.source)


def _leaves(value: Any, path: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [path]
