"""Owns the cross-entropy loss."""

from __future__ import annotations

from torch import Tensor

from fasttrain.losses.membership import float32_scope
from fasttrain.losses.overlap_loss import OverlapLoss


class CrossEntropyLoss(OverlapLoss):
    """Cross-entropy over all classes, the background among them."""

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            _, cross_entropy = self.sums(logits, label, surprise=True)
            return cross_entropy
