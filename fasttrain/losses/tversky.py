"""Owns the Tversky loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import counted_classes, float32_scope, reduced_axes, safe_ratio
from fasttrain.recipe.training_spec import TverskyLossSpec


class TverskyLoss(nn.Module):
    """One minus the Tversky index of the softmax (Salehi et al. 2017), averaged over classes.

    Equal to MONAI's `TverskyLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    """

    def __init__(self, spec: TverskyLossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            probabilities, members = counted_classes(logits, label, spec.include_background, self.ignores)
            axes = reduced_axes(probabilities, spec.batch)
            found = (probabilities * members).sum(axes)
            invented = probabilities.sum(axes) - found
            missed = members.sum(axes, dtype=torch.float32) - found
            total = found + spec.alpha * invented + spec.beta * missed
            return 1.0 - safe_ratio(found, total, spec.smooth).mean()
