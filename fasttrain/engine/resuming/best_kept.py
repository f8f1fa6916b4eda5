"""Owns what a run that goes on makes of a `best.pt` that is not the best that it knows of: it is mended, or given up in words."""

from __future__ import annotations

import contextlib
from typing import Any

from fasttrain.checkpoints import ReadCheckpoint, read_checkpoint, write_checkpoint
from fasttrain.engine.state import Progress
from fasttrain.errors import StorageError
from fasttrain.run_folder import RunFolder


def settle_best(folder: RunFolder, progress: Progress, saved: ReadCheckpoint) -> list[str]:
    """Brings `best.pt` and the best score of the progress together; returns warnings, one sentence each.

    A file that is gone, damaged or older than that score is written anew where a checkpoint of that epoch is at hand; else the
    best is what the file holds, or where it holds nothing is found anew among the epochs that are left.
    """
    told: list[str] = []
    there = saved.state if saved.path == folder.best else _read(folder, saved, told)
    holds = None if there is None else _best_of(there)
    if progress.best_epoch is None or (holds is not None and holds[1] == progress.best_epoch):
        return told
    lost = f"{progress.best_value:.4f} of epoch {progress.best_epoch}"
    if (state := _of_epoch(folder, progress, saved)) is not None:
        try:
            write_checkpoint(folder.best, state)
        except StorageError as error:
            return [*told, *error.faults]
        return [*told, f"{folder.best.name} is written anew: it holds the best score, {lost}"]
    if holds is None:
        if not told and not saved.damaged:
            told.append(f"checkpoint {folder.best} is missing")
        progress.best_value = progress.best_epoch = None
        return [
            *told,
            f"the network of the best score, {lost}, is lost: the next validation begins {folder.best.name} anew",
        ]
    progress.best_value, progress.best_epoch = holds
    return [
        *told,
        f"the network of the best score, {lost}, was never written: {folder.best.name} holds {holds[0]:.4f} of epoch {holds[1]}, "
        "which is the best from here on",
    ]


def _read(folder: RunFolder, saved: ReadCheckpoint, told: list[str]) -> dict[str, Any] | None:
    if not folder.best.exists():
        return None
    try:
        return read_checkpoint(folder.best)
    except StorageError as error:
        told += [fault for fault in error.faults if fault not in saved.damaged]
        return None


def _best_of(state: dict[str, Any]) -> tuple[float, int] | None:
    """The score of a `best.pt` and its epoch."""
    progress = state.get("progress")
    value, epoch = (
        (progress.get("best_value"), progress.get("best_epoch")) if isinstance(progress, dict) else (None, None)
    )
    return (value, epoch) if isinstance(value, float) and isinstance(epoch, int) else None


def _of_epoch(folder: RunFolder, progress: Progress, saved: ReadCheckpoint) -> dict[str, Any] | None:
    """The state that had the best score, as the checkpoint that the run goes on from or a periodic one has it."""
    assert progress.best_epoch is not None
    states, periodic = [saved.state], folder.epoch_file(progress.best_epoch)
    if saved.path != periodic and periodic.exists():
        with contextlib.suppress(StorageError):
            states.append(read_checkpoint(periodic))
    wanted = (progress.best_epoch, 0, (progress.best_value, progress.best_epoch))
    for state in states:
        theirs = state["progress"]
        if (theirs.get("epoch"), theirs.get("step_in_epoch"), _best_of(state)) == wanted:
            return state
    return None
