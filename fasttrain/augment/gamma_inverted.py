"""Owns the inverted gamma curve: the gamma of the negative image, which spreads what gamma presses together."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.gamma import Gamma
from fasttrain.augment.technique import Draw
from fasttrain.kernels import intensity_columns as columns


class GammaInverted(Gamma):
    """nnU-Net's gamma with `invert_image`."""

    name = "gamma_inverted"
    flag = columns.GAMMA_INVERTED
    column = columns.POWER_INVERTED

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Keeps what gamma keeps."""
        return super().apply(image.neg_(), draw).neg_()
