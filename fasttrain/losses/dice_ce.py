"""Owns the weighted sum of soft Dice and cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.cross_entropy import mean_cross_entropy
from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import blanked, class_membership, counted, float32_scope, known_voxels
from fasttrain.recipe.training_spec import DiceCELossSpec


class DiceCELoss(nn.Module):
    """Soft Dice plus cross-entropy, which share one softmax and one map of the reference."""

    def __init__(self, spec: DiceCELossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            known = known_voxels(label, self.ignores)
            log_probabilities = torch.log_softmax(blanked(logits.float(), known), dim=1)
            members = class_membership(label, logits.shape[1])
            background = self.spec.include_background
            probabilities = blanked(counted(log_probabilities, background).exp(), known)
            dice = soft_dice_loss(probabilities, counted(members, background), self.spec)
            cross_entropy = mean_cross_entropy(log_probabilities, members, known)
            return self.spec.dice_weight * dice + self.spec.ce_weight * cross_entropy
