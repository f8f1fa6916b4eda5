"""Owns the soft Dice loss."""

from __future__ import annotations

from torch import Tensor

from fasttrain.losses.membership import Overlap, float32_scope, safe_ratio
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.recipe.training_spec import BCEDiceLossSpec, DiceCELossSpec, DiceFocalLossSpec, DiceLossSpec

DiceTerms = DiceLossSpec | DiceCELossSpec | DiceFocalLossSpec | BCEDiceLossSpec


def soft_dice_loss(sums: Overlap, spec: DiceTerms) -> Tensor:
    """One minus soft Dice (Milletari et al. 2016), averaged over classes, and over patches unless `spec.batch`.

    Equal to MONAI's `DiceLoss(softmax=True, to_onehot_y=True)`, or `DiceLoss(sigmoid=True)` of regions, with
    `smooth_nr = smooth_dr = spec.smooth`.
    sums: of the counted classes, with squares where `spec.squared`; ignored voxels are in none of them, so that in a patch of
    nothing else every class counts as met. Where `smooth` is 0, a class absent in the label and in the prediction counts as
    met (loss 0), as it does in the limit of a small `smooth`.
    """
    common, predicted, reference = sums.over(spec.batch)
    return 1.0 - safe_ratio(2.0 * common, predicted + reference, spec.smooth).mean()


class DiceLoss(OverlapLoss):
    """Soft Dice of the softmax, or of the sigmoids of regions."""

    spec: DiceLossSpec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            sums, _ = self.sums(logits, label, self.spec.squared)
            return soft_dice_loss(sums.of_classes(self.counts_all), self.spec)
