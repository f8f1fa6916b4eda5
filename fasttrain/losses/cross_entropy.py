"""Owns the cross-entropy loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import blanked, class_membership, float32_scope, known_voxels, voxel_count
from fasttrain.recipe.training_spec import CrossEntropyLossSpec


def mean_cross_entropy(log_probabilities: Tensor, members: Tensor, known: Tensor | None) -> Tensor:
    """Mean over the `known` voxels (None: all) of −log p of the label's class; 0 where none is known. The first two tensors are
    [batch, class, *spatial], the second bool; log p is finite everywhere.

    A masked sum in place of a gather: its gradient is pointwise, so the compiler fuses it with the Dice terms, and it
    is repeatable on a GPU, where the scatter of a gather's gradient and torch's spatial NLL loss are not promised to
    be.
    """
    return -(log_probabilities * members).sum() / voxel_count(members, known)


class CrossEntropyLoss(nn.Module):
    """Cross-entropy over all classes, the background among them."""

    def __init__(self, spec: CrossEntropyLossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            known = known_voxels(label, self.ignores)
            log_probabilities = torch.log_softmax(blanked(logits.float(), known), dim=1)
            return mean_cross_entropy(log_probabilities, class_membership(label, logits.shape[1]), known)
