"""Owns where a data set lies: what was given, else `$FASTTRAIN_DATA/NAME`, else `./data/NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fasttrain.errors import DataError, StorageError
from fasttrain.recipe.recipe import Recipe

DECATHLON_TASKS = {
    "spleen": "Task09_Spleen",
    "hippocampus": "Task04_Hippocampus",
    "heart": "Task02_Heart",
    "brain-tumor": "Task01_BrainTumour",
}
"""Sets of the Medical Segmentation Decathlon by the name that recipes give them."""


def data_root(recipe: Recipe, given: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder of the recipe's data set; for phantoms it is made where it is missing.

    Raises DataError for a missing folder, naming where it was looked for and where the set can be had if that is known, and
    StorageError where a folder for phantoms cannot be made.
    """
    name = recipe.data_name
    base = environ.get("FASTTRAIN_DATA")
    if given is not None:
        root, origin = given, "--data"
    elif base:
        root, origin = Path(base).expanduser() / name, "$FASTTRAIN_DATA"
    else:
        root, origin = Path("data") / name, "./data, since $FASTTRAIN_DATA is not set"
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
    task = DECATHLON_TASKS.get(name)
    fetch = f"; it is {task} of http://medicaldecathlon.com" if task is not None else ""
    raise DataError(
        f"the data set {name} is not at {root.absolute()} (from {origin}); name its folder with --data{fetch}"
    )
