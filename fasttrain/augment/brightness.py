"""Owns brightness: a factor on each channel, drawn on either side of 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, around_one, drawn, happens, per_sample, sent
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import BrightnessSpec


class Brightness:
    """nnU-Net's multiplicative brightness, one factor a channel."""

    name = "brightness"

    def __init__(self, spec: BrightnessSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """factor: [sample, channel]."""
        values = chances.numbers(self.name, 1 + 2 * channels)
        active = happens(self.spec.probability, values[:, 0])
        return drawn(active=active, factor=around_one(self.spec.low, self.spec.high, values[:, 1:]))

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """As a factor of the map."""
        active = draw["active"].numpy()[:, None]
        rows.act(columns.SHADE, active)
        rows.floats[..., columns.MAP + 1] *= np.where(active, draw["factor"].numpy(), 1.0)

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Multiplies by the factors."""
        return image.mul_(per_sample(sent(draw["factor"], image.device), image))
