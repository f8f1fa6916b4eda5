"""Owns the generalised Dice loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.losses.membership import float32_scope, safe_ratio
from fasttrain.losses.overlap_loss import OverlapLoss
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


class GeneralisedDiceLoss(OverlapLoss):
    """One Dice over all classes of the softmax, or sigmoids of regions, each weighted by its size (Sudre et al. 2017).

    Equal to MONAI's `GeneralizedDiceLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    """

    spec: GeneralisedDiceLossSpec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            sums, _ = self.sums(logits, label)
            common, predicted, voxels = sums.of_classes(self.counts_all).over(spec.batch)
            weights = class_weights(voxels, spec.weighting)
            overlap = (weights * common).sum(-1)
            total = (weights * (predicted + voxels)).sum(-1)
            return 1.0 - safe_ratio(2.0 * overlap, total, spec.smooth).mean()
