"""Owns the weighted sum of soft Dice and binary cross-entropy, for networks with one output channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import float32_scope
from fasttrain.recipe.training_spec import BCEDiceLossSpec


class BCEDiceLoss(nn.Module):
    """Soft Dice of the sigmoid plus binary cross-entropy; equal to MONAI's `DiceCELoss(sigmoid=True)` on one channel."""

    def __init__(self, spec: BCEDiceLossSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, 1, *spatial] and class indices 0 and 1, [batch, 1, *spatial].

        Raises ValueError where the logits have more channels.
        """
        if logits.shape[1] != 1:
            raise ValueError(f"bce_dice takes the sigmoid of one channel, found {logits.shape[1]}; use dice_ce")
        with float32_scope(logits):
            logits = logits.float()
            members = label > 0
            dice = soft_dice_loss(torch.sigmoid(logits), members, self.spec)
            cross_entropy = F.binary_cross_entropy_with_logits(logits, members.float())
            return self.spec.dice_weight * dice + self.spec.bce_weight * cross_entropy
