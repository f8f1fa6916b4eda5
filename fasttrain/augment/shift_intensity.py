"""Owns a constant added to each channel."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, per_sample, sent, uniform
from fasttrain.recipe.augment_spec import ShiftIntensitySpec


class ShiftIntensity:
    """Offsets are drawn from ±`offset`, one a channel."""

    name = "shift_intensity"

    def __init__(self, spec: ShiftIntensitySpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """offset: [sample, channel]."""
        values = chances(self.name, 1 + channels)
        active = happens(self.spec.probability, values[:, 0])
        return {"active": active, "offset": uniform(-self.spec.offset, self.spec.offset, values[:, 1:])}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Adds the offsets."""
        return image + per_sample(sent(draw["offset"], image.device), image)
