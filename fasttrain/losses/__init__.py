"""Owns the list of losses and builds the one a recipe names.

A loss is called with logits [batch, class, *spatial] of any float type, or a tuple of them from the finest to the
coarsest head, and a label [batch, 1, *spatial] of uint8 class indices below the number of classes. With `regions` logits have a
channel a region, and regions may overlap; without them `bce_dice` alone has logits of one channel, those of class 1.
(`masked_mae` and `masked_mse` have one channel of dose, and for a label the dose and its mask, float32 [batch, 2, *spatial].)
It returns a float32 scalar. A loss that was built with `ignores` leaves
voxels of the index IGNORED out of every sum and count, whatever their logits are; they get no gradient, and a patch that
has no others costs nothing. All of them run without host synchronisation
or data-dependent shapes, so that a step can be compiled or captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fasttrain.losses.bce_dice import BCEDiceLoss
from fasttrain.losses.cross_entropy import CrossEntropyLoss
from fasttrain.losses.deep_supervision import DeepSupervisionLoss
from fasttrain.losses.dice import DiceLoss
from fasttrain.losses.dice_ce import DiceCELoss
from fasttrain.losses.dice_focal import DiceFocalLoss
from fasttrain.losses.generalised_dice import GeneralisedDiceLoss
from fasttrain.losses.masked_error import MaskedError
from fasttrain.losses.overlap_loss import OverlapLoss
from fasttrain.losses.tversky import TverskyLoss

if TYPE_CHECKING:
    from torch import nn

    from fasttrain.recipe import Recipe
    from fasttrain.recipe.training_spec import LossSpec

__all__ = ["LOSSES", "build_loss", "by_kernels", "loss_of"]

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "dice": DiceLoss,
    "dice_ce": DiceCELoss,
    "dice_focal": DiceFocalLoss,
    "generalised_dice": GeneralisedDiceLoss,
    "tversky": TverskyLoss,
    "bce_dice": BCEDiceLoss,
    "cross_entropy": CrossEntropyLoss,
    "masked_mae": MaskedError,
    "masked_mse": MaskedError,
}


def build_loss(
    spec: LossSpec, ignores: bool = False, fused: bool = False, regions: Sequence[Sequence[int]] = ()
) -> nn.Module:
    """The loss of `spec`, for networks with and without deep supervision alike; `ignores`: labels may hold IGNORED.

    fused: losses take their sums by fasttrain's kernels, where there are any for the logits at hand. regions: the
    class indices that each channel's region holds; none: the channels are classes.
    """
    loss = LOSSES[spec.kind](spec, ignores)
    if isinstance(loss, OverlapLoss):
        loss.fused = fused
        if regions:
            loss.set_regions(regions)
    return DeepSupervisionLoss(loss)


def by_kernels(spec: LossSpec, regions: bool = False) -> bool:
    """Whether fasttrain's kernels take the sums of a loss, on a softmax of classes or on sigmoids of regions."""
    loss = LOSSES[spec.kind]
    return isinstance(loss, type) and issubclass(loss, OverlapLoss) and (loss.summed or regions or bool(loss.regions))


def loss_of(recipe: Recipe, fused: bool) -> nn.Module:
    """The loss that trains a recipe's network: see `build_loss`."""
    regions = recipe.regions
    return build_loss(recipe.loss, recipe.data.ignore_label is not None, fused, regions.members if regions else ())
