"""Owns how values of the host get to a device: by way of pinned memory, on a stream of their own."""

from __future__ import annotations

import torch
from torch import Tensor

_STAGED_BYTES = 4 << 20


class Stager:
    """Copies to the device by way of two pinned pieces of memory: one is written while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._number = 0
        if self._stream is not None:
            # A thread begins on the first GPU, and pinning would wake that one up
            if device.index is not None:
                torch.cuda.set_device(device)
            self._pieces = [pinned(_STAGED_BYTES, torch.uint8) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)]

    def copy(self, values: Tensor, target: Tensor) -> None:
        """values: [n, k] of any strides on the host; target: [n, k] contiguous, which must not be read before all has settled."""
        if self._stream is None:
            target.copy_(values)
            return
        step = max(_STAGED_BYTES // (values.shape[1] * values.element_size()), 1)
        for first in range(0, len(values), step):
            part = values[first : first + step]
            piece, copied = self._pieces[self._number % 2], self._copied[self._number % 2]
            self._number += 1
            copied.synchronize()
            staged = piece[: part.numel() * part.element_size()].view(values.dtype).view(part.shape)
            staged.copy_(part)
            with torch.cuda.stream(self._stream):
                target[first : first + step].copy_(staged, non_blocking=True)
                copied.record()


def pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU copies from without waiting; where the system pins no more of it, ordinary memory."""
    try:
        return torch.empty(count, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=dtype)
