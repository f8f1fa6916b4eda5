"""Owns where the recipes that come with fasttrain lie."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".yaml", ".yml")


def bundled_folder() -> Path:
    """The package's own folder in an installed wheel, the checkout's `recipes/` in an editable install."""
    inside = Path(__file__).parent / "bundled"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"


def bundled_recipes() -> dict[str, Path]:
    """Name → file, sorted by name."""
    return {path.stem: path for path in sorted(bundled_folder().glob("*.yaml"), key=lambda path: path.stem)}
