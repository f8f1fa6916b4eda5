"""Owns brightness: a factor on each channel, drawn on either side of 1."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, around_one, happens, per_sample, sent
from fasttrain.recipe.augment_spec import BrightnessSpec


class Brightness:
    """nnU-Net's multiplicative brightness, one factor a channel."""

    name = "brightness"

    def __init__(self, spec: BrightnessSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """factor: [sample, channel]."""
        values = chances(self.name, 1 + 2 * channels)
        active = happens(self.spec.probability, values[:, 0])
        return {"active": active, "factor": around_one(self.spec.low, self.spec.high, values[:, 1:])}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Multiplies by the factors."""
        return image.mul_(per_sample(sent(draw["factor"], image.device), image))
