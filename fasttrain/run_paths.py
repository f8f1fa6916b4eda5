"""Owns the runs under one folder: how a new one that nobody named is called, and which of those there is the newest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from fasttrain.errors import StorageError
from fasttrain.run_folder import RunFolder


def new_run_path(name: str, base: Path = Path("runs"), now: Callable[[], float] = time.time) -> Path:
    """`runs/NAME-TIMESTAMP`, with a number behind it where two runs begin in one second."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now()))
    path = base / f"{name}-{stamp}"
    number = 2
    while os.path.lexists(path):
        path = base / f"{name}-{stamp}-{number}"
        number += 1
    return path


def make_new_run_path(name: str, path: Path | None = None, option: str = "--run") -> Path:
    """Makes the folder of a run that nobody named: `path`, or one by a further name where another process has that since.

    Raises StorageError where it cannot be made.
    """
    while True:
        path = new_run_path(name) if path is None else path
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            # Made by nobody: it is a folder above it that is something else
            if isinstance(error, FileExistsError) and os.path.lexists(path):
                path = None
                continue
            raise StorageError(
                f"run folder {path} cannot be made: {error.strerror}; choose another with {option}"
            ) from error


def runs_by_age(base: Path = Path("runs")) -> list[RunFolder]:
    """The folders under `base` that hold a run, or what is left of one, newest first."""
    runs = [RunFolder(path) for path in base.iterdir() if not path.name.startswith(".")] if base.is_dir() else []
    begun = {run.path: began for run in runs if (began := run.began()) is not None}
    return sorted((run for run in runs if run.path in begun), key=lambda run: begun[run.path], reverse=True)


def newest_unfinished(base: Path = Path("runs")) -> tuple[Path | None, Path | None]:
    """The newest run under `base` that can be gone on with, and the newest of all; None where there is none."""
    runs = [run for run in runs_by_age(base) if run.holds_a_run()]
    newest = runs[0].path if runs else None
    return next((run.path for run in runs if not run.finished() and not run.never_trained()), None), newest
