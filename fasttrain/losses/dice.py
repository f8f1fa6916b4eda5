"""Owns the soft Dice loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import counted_classes, float32_scope, reduced_axes, safe_ratio
from fasttrain.recipe.training_spec import BCEDiceLossSpec, DiceCELossSpec, DiceFocalLossSpec, DiceLossSpec

DiceTerms = DiceLossSpec | DiceCELossSpec | DiceFocalLossSpec | BCEDiceLossSpec


def soft_dice_loss(probabilities: Tensor, members: Tensor, spec: DiceTerms) -> Tensor:
    """One minus soft Dice (Milletari et al. 2016), averaged over classes, and over patches unless `spec.batch`.

    Equal to MONAI's `DiceLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    probabilities: float32 [batch, class, *spatial], the counted classes alone; members: bool of the same shape; both 0 at
    ignored voxels, so that in a patch of nothing else every class counts as met. Where `smooth` is 0, a class absent in the
    label and in the prediction counts as met (loss 0), as it does in the limit of a small `smooth`.
    """
    axes = reduced_axes(probabilities, spec.batch)
    overlap = (probabilities * members).sum(axes)
    predicted = (probabilities.square() if spec.squared else probabilities).sum(axes)
    total = predicted + members.sum(axes, dtype=torch.float32)
    return 1.0 - safe_ratio(2.0 * overlap, total, spec.smooth).mean()


class DiceLoss(nn.Module):
    """Soft Dice of the softmax."""

    def __init__(self, spec: DiceLossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.ignores = ignores

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            return soft_dice_loss(
                *counted_classes(logits, label, self.spec.include_background, self.ignores), self.spec
            )
