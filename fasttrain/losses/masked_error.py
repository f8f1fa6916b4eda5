"""Owns the losses of doses: the mean error over the voxels to which a dose is possible."""

from __future__ import annotations

from torch import Tensor, nn

from fasttrain.kernels.structure_bits import as_dose
from fasttrain.losses.membership import float32_scope
from fasttrain.recipe.training_spec import MaskedMAELossSpec, MaskedMSELossSpec


class MaskedError(nn.Module):
    """Mean absolute or squared error of the dose over the mask of the whole batch, in units of the dose's scale.

    What a network answers outside the mask costs nothing and gets no gradient; a batch without any mask costs 0.
    """

    def __init__(self, spec: MaskedMAELossSpec | MaskedMSELossSpec, ignores: bool = False) -> None:
        super().__init__()
        self.squares = spec.kind == "masked_mse"

    def forward(self, answer: Tensor, target: Tensor) -> Tensor:
        """Float32 scalar from answers [batch, 1, *spatial] and dose and mask, float32 [batch, 2, *spatial]."""
        with float32_scope(answer):
            dose, mask = target[:, :1], target[:, 1:]
            difference = (as_dose(answer) - dose) * mask
            error = difference.square() if self.squares else difference.abs()
            return error.sum() / mask.sum().clamp_min(1.0)
