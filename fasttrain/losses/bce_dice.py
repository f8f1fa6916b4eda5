"""Owns the weighted sum of soft Dice and binary cross-entropy, for networks with one output channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import blanked, float32_scope, known_voxels, overlap_of, voxel_count
from fasttrain.recipe.training_spec import BCEDiceLossSpec


class BCEDiceLoss(nn.Module):
    """Soft Dice of the sigmoid plus binary cross-entropy; equal to MONAI's `DiceCELoss(sigmoid=True)` on one channel."""

    def __init__(self, spec: BCEDiceLossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, 1, *spatial] and class indices 0 and 1, [batch, 1, *spatial].

        Raises ValueError where the logits have more channels.
        """
        if logits.shape[1] != 1:
            raise ValueError(f"bce_dice takes the sigmoid of one channel, found {logits.shape[1]}; use dice_ce")
        with float32_scope(logits):
            known = known_voxels(label, self.ignores)
            logits = blanked(logits.float(), known)
            members = label == 1
            sums = overlap_of(blanked(torch.sigmoid(logits), known), members, self.spec.squared)
            dice = soft_dice_loss(sums, self.spec)
            losses = F.binary_cross_entropy_with_logits(logits, members.float(), reduction="none")
            cross_entropy = blanked(losses, known).sum() / voxel_count(losses, known)
            return self.spec.dice_weight * dice + self.spec.bce_weight * cross_entropy
