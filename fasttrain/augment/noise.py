"""Owns additive Gaussian noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, sent, uniform
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.kernels.noise import normal_field
from fasttrain.recipe.augment_spec import NoiseSpec


class Noise:
    """The standard deviation is drawn from 0…`std`, the field from a seed of the sample's own."""

    name = "noise"

    def __init__(self, spec: NoiseSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """std: [sample]; seed: [sample] int64."""
        values = chances.numbers(self.name, 2)
        draw = drawn(active=happens(self.spec.probability, values[:, 0]), std=uniform(0.0, self.spec.std, values[:, 1]))
        return {**draw, "seed": chances.seeds(self.name)}

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """The seed of a sample is that of all its channels, whose fields differ."""
        rows.act(columns.NOISE, draw["active"].numpy()[:, None])
        rows.ints[..., columns.SEED : columns.SEED + 2] = draw["seed"].numpy().view(np.int32).reshape(-1, 1, 2)
        rows.floats[..., columns.STD] = draw["std"].numpy()[:, None]

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Adds the field, a function of seed, channel and voxel, which is the same on every device."""
        voxels = image[0, 0].numel()
        seeds, std = sent(draw["seed"], image.device), sent(draw["std"], image.device)
        for row in range(len(image)):
            field = normal_field(seeds[row], image.shape[1], voxels)
            image[row] += field.view(image.shape[1:]).mul_(std[row])
        return image
