"""Owns how a checkpoint file becomes a state again: sound ones only, and of several the one wanted, or the one furthest on."""

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

_NOWHERE = (-1, -1)


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
    if last.exists():
        state = _sound(last, damaged)
        if state is not None:
            return ReadCheckpoint(last, state)
    return _furthest(last, others, damaged)


def furthest_good(last: Path, others: Iterable[Path]) -> ReadCheckpoint:
    """The sound one of all that got furthest, `last` where another got as far; raises StorageError where none is sound.

    Whatever was cut short between two files, or writes one of them less often, leaves another that is newer than `last`. Only the
    one that is chosen is read as a whole, and those that say nothing of how far they got.
    """
    return _furthest(last, [last, *others], [])


def _furthest(last: Path, paths: Iterable[Path], damaged: list[str]) -> ReadCheckpoint:
    reached: dict[Path, tuple[int, int]] = {}
    read: dict[Path, dict[str, Any]] = {}
    for path in paths:
        if not path.exists():
            continue
        place = _glance(path)
        if place is None and (state := _sound(path, damaged)) is not None:
            read[path], place = state, _place(state)
        if place is not None:
            reached[path] = place
    # Stable, so that of two that got as far the first one stands
    for path in sorted(reached, key=lambda one: reached[one], reverse=True):
        state = read[path] if path in read else _sound(path, damaged)
        if state is not None:
            return ReadCheckpoint(path, state, tuple(damaged))
    raise StorageError(damaged or [f"there is no checkpoint to go on from: {last} does not exist"])


def _sound(path: Path, damaged: list[str]) -> dict[str, Any] | None:
    try:
        return read_checkpoint(path)
    except StorageError as error:
        damaged.extend(error.faults)
        return None


def _glance(path: Path) -> tuple[int, int] | None:
    """How far a checkpoint says that it got, without reading its tensors; None where it does not say."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whatever is wrong with it shows when it is read as a whole
        return None
    place = _place(state) if isinstance(state, dict) else _NOWHERE
    return None if place == _NOWHERE else place


def _place(state: dict[str, Any]) -> tuple[int, int]:
    """Steps and closed epochs of a checkpoint; `_NOWHERE` where it does not say, so that any that does comes first."""
    progress = state.get("progress")
    if not isinstance(progress, dict):
        return _NOWHERE
    step, epoch = progress.get("step"), progress.get("epoch")
    return (step if isinstance(step, int) else -1, epoch if isinstance(epoch, int) else -1)
