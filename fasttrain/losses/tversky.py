"""Owns the Tversky loss."""

from __future__ import annotations

from torch import Tensor

from fasttrain.losses.membership import float32_scope, safe_ratio
from fasttrain.losses.softmax_loss import SoftmaxLoss
from fasttrain.recipe.training_spec import TverskyLossSpec


class TverskyLoss(SoftmaxLoss):
    """One minus the Tversky index of the softmax (Salehi et al. 2017), averaged over classes.

    Equal to MONAI's `TverskyLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    """

    spec: TverskyLossSpec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        spec = self.spec
        with float32_scope(logits):
            sums, _ = self.sums(logits, label)
            found, predicted, reference = sums.of_classes(spec.include_background).over(spec.batch)
            total = found + spec.alpha * (predicted - found) + spec.beta * (reference - found)
            return 1.0 - safe_ratio(found, total, spec.smooth).mean()
