"""Owns simulated low resolution: fewer voxels, then as many as before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import LowResolutionSpec

_LINEAR = {2: "bilinear", 3: "trilinear"}


class LowResolution:
    """Zooms are drawn from `low…high`, one a channel, the same along all axes (nnU-Net v2's SimulateLowResolution)."""

    def __init__(self, spec: LowResolutionSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """chosen: bool [channel]; zoom: [channel]."""
        return {
            "active": happens(self.spec.probability, generator),
            "chosen": torch.rand(channels, generator=generator) < self.spec.channel_probability,
            "zoom": uniform(self.spec.low, self.spec.high, (channels,), generator),
        }

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Nearest voxels down, linear up; one volume at a time, since each has a size of its own."""
        size = image.shape[2:]
        for sample, channel in draw["chosen"].nonzero().tolist():
            zoom = float(draw["zoom"][sample, channel])
            smaller = [max(round(length * zoom), 1) for length in size]
            if smaller == list(size):
                continue
            volume = image[sample : sample + 1, channel : channel + 1]
            coarse = F.interpolate(volume, smaller, mode="nearest-exact")
            volume.copy_(F.interpolate(coarse, size, mode=_LINEAR[len(size)], align_corners=False))
        return image
