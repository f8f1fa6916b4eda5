"""Owns the cross-entropy loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import class_membership, float32_scope
from fasttrain.recipe.training_spec import CrossEntropyLossSpec


def mean_cross_entropy(log_probabilities: Tensor, members: Tensor) -> Tensor:
    """Mean over voxels of −log p of the label's class; both tensors are [batch, class, *spatial], the second bool.

    A masked sum in place of a gather: its gradient is pointwise, so the compiler fuses it with the Dice terms, and it
    is repeatable on a GPU, where the scatter of a gather's gradient and torch's spatial NLL loss are not promised to
    be.
    """
    voxels = members.numel() // members.shape[1]
    return -(log_probabilities * members).sum() / voxels


class CrossEntropyLoss(nn.Module):
    """Cross-entropy over all classes, the background among them."""

    def __init__(self, spec: CrossEntropyLossSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            log_probabilities = torch.log_softmax(logits.float(), dim=1)
            return mean_cross_entropy(log_probabilities, class_membership(label, logits.shape[1]))
