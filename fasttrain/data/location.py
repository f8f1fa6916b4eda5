"""Owns where a data set lies: what was given, else `$FASTTRAIN_DATA/NAME`, else `./data/NAME`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.errors import DataError, StorageError

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe

DECATHLON_TASKS = {
    "spleen": "Task09_Spleen",
    "hippocampus": "Task04_Hippocampus",
    "heart": "Task02_Heart",
    "brain-tumor": "Task01_BrainTumour",
}
"""Sets of the Medical Segmentation Decathlon by the name that recipes give them."""


def data_root(recipe: Recipe, given: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder of the recipe's data set; for phantoms it is made where it is missing.

    Raises DataError for a missing folder, naming where it was looked for and the command that fetches it if there is one, and
    StorageError where a folder for phantoms cannot be made.
    """
    name = recipe.data_name
    root, origin = (given, "--data") if given is not None else usual_folder(name, environ)
    if recipe.data.source.kind == "phantom":
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{root} cannot be made for the phantoms: {error.strerror or error}; choose another folder with --data"
            ) from error
        return root
    if root.is_dir():
        return root
    if root.exists():
        raise DataError(f"{root} (from {origin}) is a file; the folder of the data set {name} is expected")
    where = "" if given is None else f" --to {shlex.quote(str(given))}"
    fetch = f"fetch it with `fasttrain data fetch {name}{where}`, or " if name in DECATHLON_TASKS else ""
    raise DataError(
        f"the data set {name} is not at {root.absolute()} (from {origin}); {fetch}name its folder with --data"
    )


def usual_folder(name: str, environ: Mapping[str, str]) -> tuple[Path, str]:
    """Where a set of that name lies unless another folder is given, and what says so."""
    base = environ.get("FASTTRAIN_DATA")
    if base:
        return Path(base).expanduser() / name, "$FASTTRAIN_DATA"
    return Path("data") / name, "./data, since $FASTTRAIN_DATA is not set"
