"""Owns the digest of a checkpoint's content, taken over values and not over the file, so that it is part of the file."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import torch

KEY = "checksum"


def checksum(state: dict[str, Any]) -> str:
    """SHA-256 over every path, type, shape and byte in `state`, without its own entry. Raises TypeError for other values."""
    digest = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous()
            digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        elif type(value) in (dict, OrderedDict):
            digest.update(f"dict {len(value)};".encode())
            for key, item in value.items():
                if type(key) not in (str, int):
                    raise TypeError(f"a checkpoint's keys are strings and whole numbers, found {type(key).__name__}")
                digest.update(f"{key!r}:".encode())
                visit(item)
        elif type(value) in (list, tuple, torch.Size):
            digest.update(f"list {len(value)};".encode())
            for item in value:
                visit(item)
        # Exact types: a NumPy number is a float too, and would be pickled as what it is
        elif value is None or type(value) in (bool, int, float, str):
            digest.update(f"{value!r};".encode())
        else:
            raise TypeError(f"a checkpoint holds tensors and plain values only, found {type(value).__name__}")

    visit({key: value for key, value in state.items() if key != KEY})
    return digest.hexdigest()
