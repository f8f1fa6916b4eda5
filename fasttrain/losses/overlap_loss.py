"""Owns what losses over probabilities are made of: sums over each image, by torch's operations or in one pass of a kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.kernels import class_sums, region_sums
from fasttrain.losses.membership import (
    Overlap,
    blanked,
    class_membership,
    known_voxels,
    overlap_of,
    region_membership,
    voxel_count,
)
from fasttrain.samples import IGNORED


class OverlapLoss(nn.Module):
    """Base of the losses over probabilities of logits [batch, channel, *spatial], with class indices [batch, 1, *spatial]: the
    softmax of the classes or, with `regions`, the sigmoid of each region.

    summed: on a softmax the loss is made of `sums` alone. fused: fasttrain's kernels then take them, and those of regions for
    every loss, where logits lie as they need them. regions: of each channel the class indices that it holds.
    """

    summed = True
    fused = False
    regions: tuple[tuple[int, ...], ...] = ()

    def __init__(self, spec: Any, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores
        self.bits: Tensor | None = None
        if self.regions:
            self.set_regions(self.regions)

    def set_regions(self, regions: Sequence[Sequence[int]]) -> None:
        """From now on channels are regions."""
        self.regions = tuple(tuple(members) for members in regions)
        self.bits = region_sums.region_bits(self.regions)

    @property
    def counts_all(self) -> bool:
        """Whether all channels are looked at: regions have no background among them."""
        return bool(self.regions) or bool(self.spec.include_background)

    def members(self, label: Tensor, channels: int) -> Tensor:
        """The reference as bool maps [batch, channel, *spatial]. Raises ValueError for a number of channels that does not fit."""
        return region_membership(label, self.regions, channels) if self.regions else class_membership(label, channels)

    def probabilities(self, values: Tensor) -> Tensor:
        """Of float32 logits."""
        return torch.sigmoid(values) if self.regions else torch.softmax(values, dim=1)

    def sums(
        self, logits: Tensor, label: Tensor, squared: bool = False, surprise: bool = False
    ) -> tuple[Overlap, Tensor]:
        """The overlap of all channels, and with `surprise`, which is for a softmax, the mean of −log p of the label's class over
        the voxels that count, a scalar (0 where none does). To be called with autocast off.
        """
        if self.fused and not self.regions and class_sums.usable(logits):
            ignored = IGNORED if self.ignores else None
            common, predicted, reference, missed = class_sums.class_sums(logits, label, squared, ignored)
            return Overlap(common, predicted, reference), missed.sum() / reference.sum().clamp_min(1)
        if not surprise and (found := self.fused_focal(logits, label, squared, 0.0, None)) is not None:
            return found[0], logits.new_zeros(())
        known = known_voxels(label, self.ignores)
        members = self.members(label, logits.shape[1])
        values = blanked(logits.float(), known)
        if not surprise:
            return overlap_of(blanked(self.probabilities(values), known), members, squared), logits.new_zeros(())
        logarithms = torch.log_softmax(values, dim=1)
        overlap = overlap_of(blanked(logarithms.exp(), known), members, squared)
        # A masked sum in place of a gather: its gradient is pointwise, and repeatable on a GPU, where that of a gather and
        # torch's spatial NLL loss are not promised to be
        return overlap, -(logarithms * members).sum() / overlap.reference.sum().clamp_min(1)

    def fused_focal(
        self, logits: Tensor, label: Tensor, squared: bool, gamma: float, alpha: float | None
    ) -> tuple[Overlap, Tensor] | None:
        """The overlap of regions and the mean of their focal loss, or with a gamma of 0 of binary cross-entropy, over the voxels
        that count; None where there are no regions or no kernels for these logits. To be called with autocast off.
        """
        if not self.fused or self.bits is None or not region_sums.usable(logits):
            return None
        if self.bits.device != label.device:
            # In the first step, before any is recorded
            self.bits = self.bits.to(label.device)
        if logits.shape[1] != len(self.regions):
            raise ValueError(
                f"this loss takes the sigmoid of one channel a region, {len(self.regions)}, found {logits.shape[1]}"
            )
        ignored = IGNORED if self.ignores else None
        common, predicted, reference, missed = region_sums.region_sums(
            logits, label, self.bits, squared, gamma, alpha, ignored
        )
        voxels = voxel_count(label, known_voxels(label, self.ignores))
        return Overlap(common, predicted, reference), missed.sum() / (voxels * len(self.regions))
