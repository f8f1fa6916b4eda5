"""Owns how a checkpoint file becomes a state again: sound ones only, and the newest sound one where the last is damaged."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttrain.checkpoints.checksum import KEY, checksum
from fasttrain.checkpoints.write import FORMAT_VERSION
from fasttrain.errors import StorageError


@dataclass(frozen=True)
class ReadCheckpoint:
    """A sound checkpoint and what was found to be damaged on the way to it, one sentence each."""

    path: Path
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in `path`, on the CPU; raises StorageError where the file is missing, damaged or of another format."""
    if not path.is_file():
        raise StorageError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file, pickle's and zip's among them
        # A file cut short makes torch seek before its beginning, which is no fault of the disk
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise StorageError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error
        raise StorageError(
            f"checkpoint {path} is damaged: it is {path.stat().st_size:,} bytes and no whole file"
        ) from error
    if not isinstance(state, dict) or KEY not in state:
        raise StorageError(f"{path} is no checkpoint of fasttrain")
    # A foreign file may hold anything there, and a comparison with a tensor is one
    if type(state.get("format")) is not int or state["format"] != FORMAT_VERSION:
        raise StorageError(
            f"checkpoint {path} has format {state.get('format')}; this fasttrain reads format {FORMAT_VERSION}"
        )
    try:
        sound = isinstance(state[KEY], str) and checksum(state) == state[KEY]
    except (TypeError, RuntimeError, RecursionError):
        sound = False
    if not sound:
        raise StorageError(f"checkpoint {path} is damaged: its checksum does not match its content")
    return state


def newest_good(last: Path, others: Iterable[Path]) -> ReadCheckpoint:
    """`last` where it is sound, else the sound one of `others` that got furthest; raises StorageError where none is sound.

    How far one got is its `progress.step`: file times are lost when a run is copied.
    """
    damaged: list[str] = []

    def sound(path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            return read_checkpoint(path)
        except StorageError as error:
            damaged.extend(error.faults)
            return None

    state = sound(last)
    if state is not None:
        return ReadCheckpoint(last, state)
    found = [(path, state) for path in others if (state := sound(path)) is not None]
    if not found:
        raise StorageError(damaged or [f"there is no checkpoint to go on from: {last} does not exist"])
    path, state = max(found, key=lambda pair: _steps(pair[1]))
    return ReadCheckpoint(path, state, tuple(damaged))


def _steps(state: dict[str, Any]) -> int:
    """How far a checkpoint got; -1 where it does not say, so that any that does comes first."""
    progress = state.get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) else -1
