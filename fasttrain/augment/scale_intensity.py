"""Owns a factor on each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw, happens, per_sample, uniform
from fasttrain.recipe.augment_spec import ScaleIntensitySpec


class ScaleIntensity:
    """Factors are drawn from `low…high`, one a channel."""

    def __init__(self, spec: ScaleIntensitySpec) -> None:
        self.spec = spec

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """factor: [channel]."""
        active = happens(self.spec.probability, generator)
        return {"active": active, "factor": uniform(self.spec.low, self.spec.high, (channels,), generator)}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Multiplies by the factors."""
        return image * per_sample(draw["factor"].to(image.device), image)
