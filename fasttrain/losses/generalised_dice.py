"""Owns the generalised Dice loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import counted_classes, float32_scope, reduced_axes, safe_ratio
from fasttrain.recipe.training_spec import GeneralisedDiceLossSpec


def class_weights(voxels: Tensor, weighting: str) -> Tensor:
    """The inverse of each class's voxels or of their square; an absent class has the largest weight of those present.

    voxels: float32, the classes last. Where no class is present all weights are 0.
    """
    if weighting == "uniform":
        return torch.ones_like(voxels)
    present = voxels > 0
    sizes = voxels.clamp_min(1.0)
    weights = torch.where(present, 1.0 / (sizes * sizes if weighting == "square" else sizes), 0.0)
    return torch.where(present, weights, weights.amax(dim=-1, keepdim=True))


class GeneralisedDiceLoss(nn.Module):
    """One Dice over all classes of the softmax, each weighted by its size (Sudre et al. 2017).

    Equal to MONAI's `GeneralizedDiceLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    """

    def __init__(self, spec: GeneralisedDiceLossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            probabilities, members = counted_classes(logits, label, spec.include_background, self.ignores)
            axes = reduced_axes(probabilities, spec.batch)
            voxels = members.sum(axes, dtype=torch.float32)
            weights = class_weights(voxels, spec.weighting)
            overlap = (weights * (probabilities * members).sum(axes)).sum(-1)
            total = (weights * (probabilities.sum(axes) + voxels)).sum(-1)
            return 1.0 - safe_ratio(2.0 * overlap, total, spec.smooth).mean()
