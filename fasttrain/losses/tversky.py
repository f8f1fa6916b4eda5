"""Owns the Tversky loss."""

from __future__ import annotations

from torch import Tensor

from fasttrain.losses.membership import float32_scope, safe_ratio
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.recipe.training_spec import TverskyLossSpec


class TverskyLoss(OverlapLoss):
    """One minus the Tversky index of the softmax (Salehi et al. 2017), or of sigmoids, averaged over classes or regions.

    Equal to MONAI's `TverskyLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    """

    spec: TverskyLossSpec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            sums, _ = self.sums(logits, label)
            found, predicted, reference = sums.of_classes(self.counts_all).over(spec.batch)
            total = found + spec.alpha * (predicted - found) + spec.beta * (reference - found)
            return 1.0 - safe_ratio(found, total, spec.smooth).mean()
