"""Owns the weighted sum of soft Dice and the focal loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import (
    blanked,
    counted,
    float32_scope,
    known_voxels,
    overlap_of,
    voxel_count,
)
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.recipe.training_spec import DiceFocalLossSpec


def mean_sigmoid_focal(
    logits: Tensor, members: Tensor, known: Tensor | None, gamma: float, alpha: float | None
) -> Tensor:
    """Mean over the `known` voxels (None: all) and classes of −(1 − p)^gamma · log p (Lin et al. 2017), p the sigmoid of being
    right; 0 where no voxel is known.

    Equal to MONAI's `FocalLoss(gamma, alpha)`. logits: float32 [batch, class, *spatial]; members: bool of the same shape.
    """
    towards_right = torch.where(members, logits, -logits)
    log_right = F.logsigmoid(towards_right)
    # log(1 − p) without a second logarithm, and without the overflow of a division
    log_wrong = log_right - towards_right
    losses = -(gamma * log_wrong).exp() * log_right
    if alpha is not None:
        losses = losses * torch.where(members, alpha, 1.0 - alpha)
    return blanked(losses, known).sum() / (voxel_count(losses, known) * losses.shape[1])


class DiceFocalLoss(OverlapLoss):
    """Soft Dice of the softmax plus the focal loss of each class's sigmoid, as MONAI's DiceFocalLoss pairs them; of regions both
    are of the sigmoid.
    """

    spec: DiceFocalLossSpec
    summed = False

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            if (found := self.fused_focal(logits, label, spec.squared, spec.gamma, spec.alpha)) is not None:
                return spec.dice_weight * soft_dice_loss(found[0], spec) + spec.focal_weight * found[1]
            known = known_voxels(label, self.ignores)
            logits = blanked(logits.float(), known)
            members = counted(self.members(label, logits.shape[1]), self.counts_all)
            probabilities = blanked(counted(self.probabilities(logits), self.counts_all), known)
            dice = soft_dice_loss(overlap_of(probabilities, members, spec.squared), spec)
            focal = mean_sigmoid_focal(counted(logits, self.counts_all), members, known, spec.gamma, spec.alpha)
            return spec.dice_weight * dice + spec.focal_weight * focal
