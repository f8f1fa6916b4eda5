"""Owns the weighted sum of soft Dice and cross-entropy."""

from __future__ import annotations

from torch import Tensor

from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import float32_scope
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.recipe.training_spec import DiceCELossSpec


class DiceCELoss(OverlapLoss):
    """Soft Dice plus cross-entropy, which share one softmax and one map of the reference."""

    spec: DiceCELossSpec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            sums, cross_entropy = self.sums(logits, label, self.spec.squared, surprise=True)
            dice = soft_dice_loss(sums.of_classes(self.counts_all), self.spec)
            return self.spec.dice_weight * dice + self.spec.ce_weight * cross_entropy
