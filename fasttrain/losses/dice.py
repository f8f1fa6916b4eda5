"""Owns the soft Dice loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain.losses.membership import class_membership, float32_scope
from fasttrain.recipe.training_spec import DiceCELossSpec, DiceLossSpec


def soft_dice_loss(probabilities: Tensor, members: Tensor, spec: DiceLossSpec | DiceCELossSpec) -> Tensor:
    """One minus soft Dice (Milletari et al. 2016), averaged over classes, and over patches unless `spec.batch`.

    Equal to MONAI's `DiceLoss(softmax=True, to_onehot_y=True)` with `smooth_nr = smooth_dr = spec.smooth`.
    probabilities: float32 [batch, class, *spatial]; members: bool of the same shape. Where `smooth` is 0, a class
    absent in the label and in the prediction counts as met (loss 0), as it does in the limit of a small `smooth`.
    """
    if not spec.include_background:
        probabilities, members = probabilities[:, 1:], members[:, 1:]
    axes = [*([0] if spec.batch else []), *range(2, probabilities.ndim)]
    overlap = (probabilities * members).sum(axes)
    predicted = (probabilities.square() if spec.squared else probabilities).sum(axes)
    total = predicted + members.sum(axes, dtype=torch.float32)
    if spec.smooth > 0:
        return 1.0 - ((2.0 * overlap + spec.smooth) / (total + spec.smooth)).mean()
    smallest = torch.finfo(torch.float32).tiny
    # Both arms of a `where` are differentiated, so the division itself must be safe too.
    return 1.0 - torch.where(total > smallest, 2.0 * overlap / total.clamp_min(smallest), 1.0).mean()


class DiceLoss(nn.Module):
    """Soft Dice of the softmax."""

    def __init__(self, spec: DiceLossSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial] and class indices [batch, 1, *spatial]."""
        with float32_scope(logits):
            probabilities = torch.softmax(logits.float(), dim=1)
            return soft_dice_loss(probabilities, class_membership(label, logits.shape[1]), self.spec)
