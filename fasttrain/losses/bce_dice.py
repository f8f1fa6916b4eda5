"""Owns the weighted sum of soft Dice and binary cross-entropy, for one foreground class or for regions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fasttrain.losses.dice import soft_dice_loss
from fasttrain.losses.membership import blanked, float32_scope, known_voxels, overlap_of, voxel_count
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.recipe.training_spec import BCEDiceLossSpec


class BCEDiceLoss(OverlapLoss):
    """Soft Dice of sigmoids plus binary cross-entropy over all channels.

    Of one channel, that of class 1, it is MONAI's `DiceCELoss(sigmoid=True)`. Of several, a region each, MONAI would take a
    softmax for the second term; this is the pair that nnU-Net trains regions with.
    """

    spec: BCEDiceLossSpec
    summed = False
    regions = ((1,),)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, region, *spatial] and class indices [batch, 1, *spatial].

        Raises ValueError where the logits have another number of channels.
        """
        channels = logits.shape[1]
        if channels != len(self.regions):
            wanted = "one channel" if len(self.regions) == 1 else f"{len(self.regions)} channels"
            raise ValueError(f"bce_dice takes the sigmoid of {wanted}, found {channels}; use dice_ce for classes")
        spec = self.spec
        with float32_scope(logits):
            if (found := self.fused_focal(logits, label, spec.squared, 0.0, None)) is not None:
                return spec.dice_weight * soft_dice_loss(found[0], spec) + spec.bce_weight * found[1]
            known = known_voxels(label, self.ignores)
            logits = blanked(logits.float(), known)
            members = self.members(label, channels)
            sums = overlap_of(blanked(torch.sigmoid(logits), known), members, spec.squared)
            dice = soft_dice_loss(sums, spec)
            losses = F.binary_cross_entropy_with_logits(logits, members.float(), reduction="none")
            cross_entropy = blanked(losses, known).sum() / (voxel_count(losses, known) * channels)
            return spec.dice_weight * dice + spec.bce_weight * cross_entropy
