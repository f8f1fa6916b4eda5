"""Owns brightness: a factor on each channel, drawn on either side of 1."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw, around_one, happens, per_sample
from fasttrain.recipe.augment_spec import BrightnessSpec


class Brightness:
    """nnU-Net's multiplicative brightness, one factor a channel."""

    def __init__(self, spec: BrightnessSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """factor: [channel]."""
        active = happens(self.spec.probability, generator)
        return {"active": active, "factor": around_one(self.spec.low, self.spec.high, (channels,), generator)}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Multiplies by the factors."""
        return image.mul_(per_sample(draw["factor"].to(image.device), image))
