"""Owns a constant added to each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw, happens, per_sample, uniform
from fasttrain.recipe.augment_spec import ShiftIntensitySpec


class ShiftIntensity:
    """Offsets are drawn from ±`offset`, one a channel."""

    def __init__(self, spec: ShiftIntensitySpec) -> None:
        self.spec = spec

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """offset: [channel]."""
        active = happens(self.spec.probability, generator)
        return {"active": active, "offset": uniform(-self.spec.offset, self.spec.offset, (channels,), generator)}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Adds the offsets."""
        return image + per_sample(draw["offset"].to(image.device), image)
