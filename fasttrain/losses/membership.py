"""Owns the reference as one boolean map a class, and the float32 scope that every loss computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def class_membership(label: Tensor, classes: int) -> Tensor:
    """Bool [batch, class, *spatial] from indices [batch, 1, *spatial]: a quarter of a float map's memory."""
    indices = torch.arange(classes, dtype=label.dtype, device=label.device)
    return label == indices.view(1, classes, *(1,) * (label.ndim - 2))


def float32_scope(tensor: Tensor) -> torch.autocast:
    """Switches autocast off on the tensor's device: a Dice sum over 96³ voxels overflows float16."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
