"""Owns a factor on each channel."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, per_sample, sent, uniform
from fasttrain.recipe.augment_spec import ScaleIntensitySpec


class ScaleIntensity:
    """Factors are drawn from `low…high`, one a channel."""

    name = "scale_intensity"

    def __init__(self, spec: ScaleIntensitySpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """factor: [sample, channel]."""
        values = chances(self.name, 1 + channels)
        active = happens(self.spec.probability, values[:, 0])
        return {"active": active, "factor": uniform(self.spec.low, self.spec.high, values[:, 1:])}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Multiplies by the factors."""
        return image * per_sample(sent(draw["factor"], image.device), image)
