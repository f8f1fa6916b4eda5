"""Owns what losses on the softmax are made of: sums over each image, by torch's operations or in one pass of a kernel's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.kernels import class_sums
from fasttrain.losses.membership import Overlap, blanked, class_membership, known_voxels, overlap_of
from fasttrain.samples import IGNORED


class SoftmaxLoss(nn.Module):
    """Base of the losses that take the softmax of logits [batch, class, *spatial], with class indices [batch, 1, *spatial].

    fused: fasttrain's kernels take the sums where logits lie as they need them.
    """

    fused = False

    def __init__(self, spec: Any, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def sums(
        self, logits: Tensor, label: Tensor, squared: bool = False, surprise: bool = False
    ) -> tuple[Overlap, Tensor]:
        """The overlap of all classes, and with `surprise` the mean of −log p of the label's class over the voxels that count, a
        scalar (0 where none does). To be called with autocast off.
        """
        if self.fused and class_sums.usable(logits):
            ignored = IGNORED if self.ignores else None
            common, predicted, reference, missed = class_sums.class_sums(logits, label, squared, ignored)
            return Overlap(common, predicted, reference), missed.sum() / reference.sum().clamp_min(1)
        known = known_voxels(label, self.ignores)
        members = class_membership(label, logits.shape[1])
        values = blanked(logits.float(), known)
        if not surprise:
            return overlap_of(blanked(torch.softmax(values, dim=1), known), members, squared), logits.new_zeros(())
        logarithms = torch.log_softmax(values, dim=1)
        overlap = overlap_of(blanked(logarithms.exp(), known), members, squared)
        # A masked sum in place of a gather: its gradient is pointwise, and repeatable on a GPU, where that of a gather and
        # torch's spatial NLL loss are not promised to be
        return overlap, -(logarithms * members).sum() / overlap.reference.sum().clamp_min(1)
