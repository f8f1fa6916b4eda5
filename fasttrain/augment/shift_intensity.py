"""Owns a constant added to each channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, per_sample, sent, uniform
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import ShiftIntensitySpec


class ShiftIntensity:
    """Offsets are drawn from ±`offset`, one a channel."""

    name = "shift_intensity"

    def __init__(self, spec: ShiftIntensitySpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """offset: [sample, channel]."""
        values = chances.numbers(self.name, 1 + channels)
        active = happens(self.spec.probability, values[:, 0])
        return drawn(active=active, offset=uniform(-self.spec.offset, self.spec.offset, values[:, 1:]))

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """As the centre of the map to which factors come."""
        active = draw["active"].numpy()[:, None]
        rows.act(columns.SHADE, active)
        rows.floats[..., columns.MAP] = np.where(active, -draw["offset"].numpy(), 0.0)

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Adds the offsets."""
        return image + per_sample(sent(draw["offset"], image.device), image)
