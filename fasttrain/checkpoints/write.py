"""Owns how a state becomes a checkpoint file: plain tensors and values, a checksum, and never half a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from fasttrain.checkpoints.checksum import KEY, checksum
from fasttrain.errors import StorageError
from fasttrain.whole_files import write_whole

FORMAT_VERSION = 1
_BYTES_BESIDE_A_TENSOR = 512
"""What the file holds beside a tensor's own bytes: its name, its shape, and the alignment of torch's zip archive."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> int:
    """Writes `state` (tensors, numbers, strings, lists and dicts of them) to `path` and returns the bytes it takes there.

    The file loads with `torch.load(path, weights_only=True)`. Raises StorageError with the bytes needed and free where it cannot
    be written (the former file then stays), TypeError for a value that would need pickle.
    """
    whole = {"format": FORMAT_VERSION, **_owning(state)}
    whole[KEY] = checksum(whole)
    needed = checkpoint_bytes(whole)
    # Asked before, so that a disk with little left is not filled to its last byte first, at which other files fail
    if (free := free_bytes(path.parent)) is not None and free < needed:
        raise StorageError(_no_room(path, "too little room", needed))
    try:
        with write_whole(path) as stream:
            try:
                torch.save(whole, stream)
            except RuntimeError as error:
                # torch's zip writer turns a full disk into a RuntimeError of its own
                raise OSError(None, "the disk took only a part of it") from error
    except StorageError as error:
        cause = error.__cause__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause or error)
        raise StorageError(_no_room(path, reason, needed)) from cause
    return path.stat().st_size


def checkpoint_bytes(state: Any) -> int:
    """About what a state takes as a file, a little more rather than less; a weight with two names is filed once."""
    filed: set[tuple[int, int]] = set()

    def count(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            size, place = value.numel() * value.element_size(), (value.data_ptr(), value.numel())
            known = size > 0 and place in filed
            filed.add(place)
            return _BYTES_BESIDE_A_TENSOR + (0 if known else size)
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        if isinstance(value, list | tuple):
            return sum(map(count, value))
        return len(value) if isinstance(value, str) else 8

    return count(state)


def free_bytes(folder: Path, reserved: bool = True) -> int | None:
    """What the disk of a folder, or of its nearest parent that is there, has free; None where it does not say.

    reserved: with what the file system keeps for root.
    """
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            disk = os.statvfs(place)
            blocks = disk.f_bfree if reserved else disk.f_bavail
            return blocks * disk.f_frsize if disk.f_blocks else None
    return None


def _no_room(path: Path, reason: str, needed: int) -> str:
    free = free_bytes(path.parent)
    room = f"{needed:,} bytes are needed" + (f", {free:,} are free" if free is not None else "")
    return f"{path} cannot be written: {reason}; {room}"


def _owning(value: Any) -> Any:
    """`value` with a copy of each tensor that shows only a part of its storage: torch would write the whole of that."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"a checkpoint holds dense tensors only, found one in {value.layout}")
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, _owning(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_owning(item) for item in value)
    return value
