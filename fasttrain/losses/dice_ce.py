"""Owns the weighted sum of soft Dice and cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.cross_entropy import mean_cross_entropy
from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import class_membership, counted, float32_scope
from fasttrain.recipe.training_spec import DiceCELossSpec


class DiceCELoss(nn.Module):
    """Soft Dice plus cross-entropy, which share one softmax and one map of the reference."""

    def __init__(self, spec: DiceCELossSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            log_probabilities = torch.log_softmax(logits.float(), dim=1)
            members = class_membership(label, logits.shape[1])
            background = self.spec.include_background
            probabilities = counted(log_probabilities, background).exp()
            dice = soft_dice_loss(probabilities, counted(members, background), self.spec)
            cross_entropy = mean_cross_entropy(log_probabilities, members)
            return self.spec.dice_weight * dice + self.spec.ce_weight * cross_entropy
