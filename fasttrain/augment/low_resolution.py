"""Owns simulated low resolution: fewer voxels, then as many as before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, uniform
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import LowResolutionSpec

_LINEAR = {2: "bilinear", 3: "trilinear"}


class LowResolution:
    """Zooms are drawn from `low…high`, one a channel, the same along all axes (nnU-Net v2's SimulateLowResolution)."""

    name = "low_resolution"

    def __init__(self, spec: LowResolutionSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """chosen: bool [sample, channel]; zoom: [sample, channel]."""
        values = chances.numbers(self.name, 1 + 2 * channels)
        return drawn(
            active=happens(self.spec.probability, values[:, 0]),
            chosen=happens(self.spec.channel_probability, values[:, 1 : 1 + channels]),
            zoom=uniform(self.spec.low, self.spec.high, values[:, 1 + channels :]),
        )

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """Sizes are rounded here, from float64, as `apply` rounds them."""
        lengths = np.array(size)
        coarse = np.maximum(np.rint(draw["zoom"].numpy().astype(np.float64)[..., None] * lengths), 1)
        chosen = draw["active"].numpy()[:, None] & draw["chosen"].numpy()
        rows.act(columns.LOW_RESOLUTION, chosen & (coarse != lengths).any(-1))
        rows.ints[..., columns.COARSE : columns.COARSE + 3] = 1
        rows.ints[..., columns.COARSE + 3 - len(size) : columns.COARSE + 3] = coarse

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Nearest voxels down, linear up; one volume at a time, since each has a size of its own."""
        size = image.shape[2:]
        for sample, channel in draw["chosen"].nonzero().tolist():
            zoom = float(draw["zoom"][sample, channel])
            smaller = [max(round(length * zoom), 1) for length in size]
            if smaller == list(size):
                continue
            volume = image[sample : sample + 1, channel : channel + 1]
            coarse = volume
            for axis, (length, fewer) in enumerate(zip(size, smaller, strict=True), 2):
                # Whole numbers: where two voxels are equally near, torch's choice depends on the device
                places = (2 * torch.arange(fewer, device=image.device) + 1) * length // (2 * fewer)
                coarse = coarse.index_select(axis, places)
            volume.copy_(F.interpolate(coarse, size, mode=_LINEAR[len(size)], align_corners=False))
        return image
