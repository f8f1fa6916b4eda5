"""Owns how a state becomes a checkpoint file: plain tensors and values, a checksum, and never half a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fasttrain.checkpoints.checksum import KEY, checksum
from fasttrain.run_folder import write_whole

FORMAT_VERSION = 1


def write_checkpoint(path: Path, state: dict[str, Any]) -> int:
    """Writes `state` (tensors, numbers, strings, lists and dicts of them) to `path` and returns the bytes it takes there.

    The file loads with `torch.load(path, weights_only=True)`. Raises StorageError where it cannot be written (the former
    file then stays), TypeError for a value that would need pickle.
    """
    whole = {"format": FORMAT_VERSION, **_owning(state)}
    whole[KEY] = checksum(whole)
    with write_whole(path) as stream:
        try:
            torch.save(whole, stream)
        except RuntimeError as error:
            # torch's zip writer turns a full disk into a RuntimeError of its own
            raise OSError(None, "the disk took only a part of it") from error
    return path.stat().st_size


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
