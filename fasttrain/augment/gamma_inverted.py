"""Owns the inverted gamma curve: the gamma of the negative image, which spreads what gamma presses together."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.gamma import Gamma
from fasttrain.augment.technique import Draw


class GammaInverted(Gamma):
    """nnU-Net's gamma with `invert_image`."""

    name = "gamma_inverted"

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Keeps what gamma keeps."""
        return super().apply(image.neg_(), draw).neg_()
