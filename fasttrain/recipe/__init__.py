"""Recipes: what they may say, how they are found, checked and written out. Nothing here imports torch."""

from fasttrain.recipe.bundled import bundled_recipes
from fasttrain.recipe.load import ResolvedRecipe, find_recipe, resolve
from fasttrain.recipe.recipe import Recipe

__all__ = ["Recipe", "ResolvedRecipe", "bundled_recipes", "find_recipe", "resolve"]
