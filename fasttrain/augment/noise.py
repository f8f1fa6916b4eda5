"""Owns additive Gaussian noise."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, per_sample, sent, uniform
from fasttrain.recipe.augment_spec import NoiseSpec


class Noise:
    """The standard deviation is drawn from 0…`std`, the field from a seed of the sample's own."""

    name = "noise"

    def __init__(self, spec: NoiseSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """std: [sample]; seed: [sample] int64."""
        values = chances(self.name, 2)
        return {
            "active": happens(self.spec.probability, values[:, 0]),
            "std": uniform(0.0, self.spec.std, values[:, 1]),
            "seed": chances.seeds(self.name),
        }

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Adds the field; a device has its own generator, so fields agree between runs on one kind of device only."""
        generator = torch.Generator(device=image.device)
        field = torch.empty_like(image)
        for row, seed in zip(field, draw["seed"].tolist(), strict=True):
            row.normal_(generator=generator.manual_seed(seed))
        return torch.addcmul(image, field, per_sample(sent(draw["std"], image.device), image))
