"""Owns the reference as one boolean map a class, the voxels that count in it, and the float32 scope that losses compute in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasttrain.samples import IGNORED


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


def region_membership(label: Tensor, regions: Sequence[Sequence[int]], channels: int) -> Tensor:
    """Bool [batch, region, *spatial] from indices [batch, 1, *spatial]: the voxels whose class a region holds.

    Raises ValueError where a network's channels are not one a region.
    """
    if channels != len(regions):
        raise ValueError(f"this loss takes the sigmoid of one channel a region, {len(regions)}, found {channels}")
    maps = []
    for first, *others in regions:
        inside = label == first
        for index in others:
            inside |= label == index
        maps.append(inside)
    return torch.cat(maps, dim=1)


def known_voxels(label: Tensor, ignores: bool) -> Tensor | None:
    """Bool [batch, 1, *spatial], False at ignored voxels, which are members of no class; None where a recipe has none of them,
    so that nothing is computed.
    """
    return label != IGNORED if ignores else None


def blanked(values: Tensor, known: Tensor | None) -> Tensor:
    """`values` [batch, channel, *spatial] with 0 at ignored voxels.

    Whatever stood there has the gradient 0, NaN and infinity too, which a product with 0 would pass on.
    """
    return values if known is None else torch.where(known, values, 0.0)


def voxel_count(maps: Tensor, known: Tensor | None) -> int | Tensor:
    """The voxels of all patches that count, of `maps` [batch, channel, *spatial]; at least 1, since one divides by it."""
    return maps.numel() // maps.shape[1] if known is None else known.sum().clamp_min(1)


def counted(maps: Tensor, include_background: bool) -> Tensor:
    """The classes of [batch, class, *spatial] that a loss looks at, as a view."""
    return maps if include_background else maps[:, 1:]


class Overlap(NamedTuple):
    """Sums over the voxels of each image, float32 [batch, class]: of both in common, of what is predicted (its squares where a
    loss asks for them), and of the reference.
    """

    common: Tensor
    predicted: Tensor
    reference: Tensor

    def of_classes(self, include_background: bool) -> Overlap:
        """Those of the classes that a loss looks at."""
        return self if include_background else Overlap(*(sums[:, 1:] for sums in self))

    def over(self, batch: bool) -> Overlap:
        """Of the whole batch, [class], where a loss sums over it before it divides."""
        return Overlap(*(sums.sum(0) for sums in self)) if batch else self


def overlap_of(probabilities: Tensor, members: Tensor, squared: bool = False) -> Overlap:
    """The sums of float32 probabilities [batch, class, *spatial] and a reference of as many bool maps."""
    axes = list(range(2, probabilities.ndim))
    predicted = probabilities.square() if squared else probabilities
    return Overlap((probabilities * members).sum(axes), predicted.sum(axes), members.sum(axes, dtype=torch.float32))


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
