"""Owns the packed form of a dose's patches: a bit a structure, unpacked on the device into what a network sees and learns.

A patient's volumes are kept as CT and dose in the storage type and 16 bits of structures: 6 bytes a voxel, not a float for each
of 13 channels. Plain operations of fixed shapes, so that a step with them can be compiled or captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

SHARPNESS = 10.0
"""Of the softplus by which a dose becomes positive. At 10 it leaves a ReLU by 7% of the scale at 0 and by nothing beyond ±0.5,
and unlike a ReLU, whose gradient is 0 wherever the network answers too little, it never leaves voxels that cannot learn."""


def unpack(image: Tensor, label: Tensor, structures: int) -> tuple[Tensor, Tensor]:
    """What a network sees and what it learns, of patches image [batch, channel + dose, *spatial] and label [batch, 1, *spatial].

    Returns ([batch, channel + structures, *spatial], [batch, 2, *spatial]): the files' channels with a map of 0 and 1 for each
    structure, in the image's type; the dose in units of its scale and the possible dose mask, float32.
    """
    maps = _maps(label, structures + 1)
    seen = torch.cat([image[:, :-1], maps[:, :-1].to(image.dtype)], dim=1)
    return seen, torch.cat([image[:, -1:], maps[:, -1:]], dim=1).float()


def network_input(image: Tensor, label: Tensor, structures: int) -> Tensor:
    """The first half of `unpack` of one volume: [channel + structures, *spatial]."""
    maps = _maps(label[None], structures)
    return torch.cat([image[:-1], maps[0].to(image.dtype)])


def within_mask(label: Tensor, structures: int) -> Tensor:
    """Bool of the label's shape: the possible dose mask."""
    return ((label >> structures) & 1).bool()


def change_sides(label: Tensor, mirrored: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Exchanges the bits of (left, right) structures in the samples that are `mirrored`, bool [sample] on the label's device."""
    chosen = mirrored.view(-1, *(1,) * (label.ndim - 1)).to(label.dtype)
    for left, right in pairs:
        differ = ((label >> left) ^ (label >> right)) & chosen
        label = label ^ ((differ << left) | (differ << right))
    return label


def as_dose(answer: Tensor) -> Tensor:
    """A network's answer as a dose in units of its scale: float32, never negative."""
    return functional.softplus(answer.float(), beta=SHARPNESS)


def _maps(label: Tensor, count: int) -> Tensor:
    """0 and 1, int16 [batch, count, *spatial]."""
    shifts = torch.arange(count, dtype=label.dtype, device=label.device).view(1, count, *(1,) * (label.ndim - 2))
    return (label >> shifts) & 1
