"""Owns the gamma curve: values mapped to 0…1 by their own range, raised to a power, mapped back."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw, happens, per_sample, uniform
from fasttrain.recipe.augment_spec import GammaSpec


class Gamma:
    """Powers are drawn from `low…high`, one a channel."""

    def __init__(self, spec: GammaSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """power: [channel]."""
        active = happens(self.spec.probability, generator)
        return {"active": active, "power": uniform(self.spec.low, self.spec.high, (channels,), generator)}

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Keeps each channel's smallest and largest value; a constant channel stays as it is."""
        axes = tuple(range(2, image.dim()))
        low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
        span = (high - low).clamp_min(torch.finfo(image.dtype).tiny)
        return ((image - low) / span).clamp(0.0, 1.0) ** per_sample(draw["power"].to(image.device), image) * (
            high - low
        ) + low
