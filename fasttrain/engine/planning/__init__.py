"""Owns what is decided before a run: sizes, each `auto` of the recipe, and what is measured and compiled for it."""
