"""Owns the reference as one boolean map a class, and the float32 scope that every loss computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def class_membership(label: Tensor, classes: int) -> Tensor:
    """Bool [batch, class, *spatial] from indices [batch, 1, *spatial]: a quarter of a float map's memory.

    Raises ValueError for a single class: the softmax of one channel is 1 everywhere, and nothing could be learnt from it.
    """
    if classes < 2:
        raise ValueError(
            "this loss takes the softmax of two channels or more, one of them the background; use bce_dice"
        )
    indices = torch.arange(classes, dtype=label.dtype, device=label.device)
    return label == indices.view(1, classes, *(1,) * (label.ndim - 2))


def counted(maps: Tensor, include_background: bool) -> Tensor:
    """The classes of [batch, class, *spatial] that a loss looks at, as a view."""
    return maps if include_background else maps[:, 1:]


def counted_classes(logits: Tensor, label: Tensor, include_background: bool) -> tuple[Tensor, Tensor]:
    """What losses on the softmax compare: its float32 probabilities, and the reference as bool maps, both [batch, class,
    *spatial] of the counted classes.
    """
    probabilities = torch.softmax(logits.float(), dim=1)
    members = class_membership(label, logits.shape[1])
    return counted(probabilities, include_background), counted(members, include_background)


def reduced_axes(maps: Tensor, batch: bool) -> list[int]:
    """The spatial axes, and the batch where a loss sums over it before it divides."""
    return [*([0] if batch else []), *range(2, maps.ndim)]


def safe_ratio(numerator: Tensor, denominator: Tensor, smooth: float) -> Tensor:
    """(n + smooth) / (d + smooth); where `smooth` is 0, nothing over nothing is 1, as in the limit of a small `smooth`."""
    if smooth > 0:
        return (numerator + smooth) / (denominator + smooth)
    smallest = torch.finfo(torch.float32).tiny
    # Both arms of a `where` are differentiated, so the division itself must be safe too.
    return torch.where(denominator > smallest, numerator / denominator.clamp_min(smallest), 1.0)


def float32_scope(tensor: Tensor) -> torch.autocast:
    """Switches autocast off on the tensor's device: a Dice sum over 96³ voxels overflows float16."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
