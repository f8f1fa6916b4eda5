"""Owns contrast: each channel stretched about its mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, around_one, channel_mean, drawn, happens, per_sample, sent
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import ContrastSpec


class Contrast:
    """nnU-Net's contrast, one factor a channel."""

    name = "contrast"

    def __init__(self, spec: ContrastSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """factor: [sample, channel]."""
        values = chances.numbers(self.name, 1 + 2 * channels)
        active = happens(self.spec.probability, values[:, 0])
        return drawn(active=active, factor=around_one(self.spec.low, self.spec.high, values[:, 1:]))

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """One factor a channel."""
        rows.act(columns.CONTRAST, draw["active"].numpy()[:, None])
        rows.floats[..., columns.FACTOR] = draw["factor"].numpy()

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Keeps each channel's mean and, where the recipe says so, clips to its smallest and largest value."""
        stretched = torch.lerp(channel_mean(image), image, per_sample(sent(draw["factor"], image.device), image))
        if self.spec.preserve_range:
            axes = tuple(range(2, image.dim()))
            torch.clamp(stretched, image.amin(axes, keepdim=True), image.amax(axes, keepdim=True), out=stretched)
        return stretched
