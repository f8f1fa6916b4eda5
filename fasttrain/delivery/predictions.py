"""Owns what a prediction of files gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fasttrain.errors import StorageError


@dataclass(frozen=True)
class Predictions:
    """What was written, and one sentence for each input that could not be read.

    passed_over: files that fit no case by their names; labels: those that are named as the run's labels are, and were left out.
    skipped: what was done before, complete and unchanged since.
    """

    written: tuple[Path, ...]
    faults: tuple[str, ...]
    passed_over: tuple[Path, ...] = ()
    labels: tuple[Path, ...] = ()
    skipped: tuple[Path, ...] = ()


def make_folder_of(folder: Path) -> None:
    """Makes the folder that predictions go to; raises StorageError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made: {error.strerror}; name another folder for the predictions"
        ) from error
