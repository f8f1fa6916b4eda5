"""Owns the folder that a profile or an ablation writes into: a new one, beside the runs where none is named."""

from __future__ import annotations

from pathlib import Path

from fasttrain.errors import RecipeError, StorageError
from fasttrain.run_paths import make_new_run_path


def new_study_folder(asked: Path | None, name: str) -> Path:
    """Makes `asked`, which must be new or empty, or else ./runs/NAME-TIMESTAMP.

    Raises RecipeError where it holds something, StorageError where it cannot be made.
    """
    if asked is None:
        return make_new_run_path(name, option="--out")
    folder = asked
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"--out {folder}: is a file; name a new folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise RecipeError(f"--out {folder}: is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}; choose another with --out") from error
    return folder
