"""Recipes: what they may say, how they are found, checked and written out. Nothing here imports torch.

What a recipe may say, and pydantic with it, is loaded on first use: the help of a command does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.recipe.bundled import bundled_recipes

if TYPE_CHECKING:
    from fasttrain.recipe.load import ResolvedRecipe
    from fasttrain.recipe.recipe import Recipe

__all__ = ["Recipe", "ResolvedRecipe", "bundled_recipes", "find_recipe", "resolve"]


def find_recipe(name: str) -> Path:
    """The file of a bundled name or of a path; raises RecipeError with near names where there is none."""
    from fasttrain.recipe import load

    return load.find_recipe(name)


def resolve(name: str, assignments: Iterable[str] | Mapping[str, Any] = ()) -> ResolvedRecipe:
    """Reads a recipe, what it extends, and the assignments `key.path=value` (or a mapping of them); checks everything.

    Raises RecipeError with all faults found, each with file, line and path.
    """
    from fasttrain.recipe import load

    return load.resolve(name, assignments)


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from fasttrain.recipe.recipe import Recipe

        return Recipe
    if name == "ResolvedRecipe":
        from fasttrain.recipe.load import ResolvedRecipe

        return ResolvedRecipe
    raise AttributeError(f"module 'fasttrain.recipe' has no attribute {name!r}")
