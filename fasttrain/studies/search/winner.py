"""Owns the recipe of the best trial: the study's base with its values, to be trained with other seeds or for longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttrain.errors import RecipeError, StorageError
from fasttrain.recipe import resolve
from fasttrain.recipe.bundled import SUFFIXES
from fasttrain.studies.search.study import Kept
from fasttrain.whole_files import write_whole


def write_winner(kept: Kept, best: dict[str, Any], target: Path) -> Path:
    """Writes a recipe file. Raises RecipeError where it exists or is named otherwise, StorageError where it cannot be written."""
    if target.suffix not in SUFFIXES:
        raise RecipeError(f"--write {target}: a recipe file ends in {' or '.join(SUFFIXES)}")
    if target.exists() or target.is_symlink():
        raise RecipeError(f"{target} exists already; choose another file with --write")
    source = Path(best["run"]) / "recipe.yaml"
    if not source.is_file():
        raise StorageError(f"{source}, the recipe of the best trial, is gone; bring the trial's folder back")
    resolve(str(source))
    first, _, rest = source.read_text(encoding="utf-8").partition("\n")
    # The trial's own text tells which values were searched; read and written again all would be the recipe's
    kept_text = rest if first.startswith("#") else f"{first}\n{rest}"
    heading = f"# The best of study {kept.name}, from {source}; beside each value, where it came from."
    with write_whole(target) as stream:
        stream.write(f"{heading}\n{kept_text}".encode())
    return target
