"""Owns simulated low resolution: fewer voxels, then as many as before."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import LowResolutionSpec

_LINEAR = {2: "bilinear", 3: "trilinear"}


class LowResolution:
    """Zooms are drawn from `low…high`, one a channel, the same along all axes (nnU-Net v2's SimulateLowResolution)."""

    name = "low_resolution"

    def __init__(self, spec: LowResolutionSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """chosen: bool [sample, channel]; zoom: [sample, channel]."""
        values = chances(self.name, 1 + 2 * channels)
        return {
            "active": happens(self.spec.probability, values[:, 0]),
            "chosen": happens(self.spec.channel_probability, values[:, 1 : 1 + channels]),
            "zoom": uniform(self.spec.low, self.spec.high, values[:, 1 + channels :]),
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
