"""Owns Gaussian blurring, one axis after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, sent, uniform
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import BlurSpec

REACH_IN_SIGMAS = 4.0


class Blur:
    """Standard deviations in voxels are drawn from `low…high`, one a channel and axis."""

    name = "blur"

    def __init__(self, spec: BlurSpec) -> None:
        self.spec = spec
        self.radius = int(REACH_IN_SIGMAS * spec.high + 0.5)

    def draw(self, channels: int, chances: Chances) -> Draw:
        """chosen: bool [sample, channel]; sigma: [sample, channel, 3], of which a 2D patch uses the first two."""
        values = chances.numbers(self.name, 1 + 4 * channels)
        return drawn(
            active=happens(self.spec.probability, values[:, 0]),
            chosen=happens(self.spec.channel_probability, values[:, 1 : 1 + channels]),
            sigma=uniform(self.spec.low, self.spec.high, values[:, 1 + channels :]).reshape(-1, channels, 3),
        )

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """Of channels that are not chosen nothing is read."""
        rows.act(columns.BLUR, draw["active"].numpy()[:, None] & draw["chosen"].numpy())
        first = columns.SIGMA + 3 - len(size)
        rows.floats[..., first : first + len(size)] = draw["sigma"].numpy()[..., : len(size)]

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """What lies outside mirrors the inside, as in scipy's gaussian_filter."""
        samples, channels = draw["chosen"].nonzero(as_tuple=True)
        if len(samples) == 0:
            return image
        kernels = sent(self._kernels(draw["sigma"][samples, channels]), image.device)
        samples, channels = (sent(place, image.device) for place in (samples, channels))
        volumes = image[samples, channels]
        for axis in range(1, volumes.dim()):
            volumes = _filtered(volumes, kernels[:, axis - 1], axis, self.radius)
        image[samples, channels] = volumes
        return image

    def _kernels(self, sigma: Tensor) -> Tensor:
        """[volume, axis, tap]: every kernel has the taps of the widest, so that volumes are filtered together."""
        taps = torch.arange(-self.radius, self.radius + 1, dtype=sigma.dtype)
        weights = torch.exp(-0.5 * (taps / sigma[..., None]) ** 2)
        return weights / weights.sum(-1, keepdim=True)


def _filtered(volumes: Tensor, kernels: Tensor, axis: int, radius: int) -> Tensor:
    """volumes: [volume, *spatial]; kernels: [volume, tap].

    Weighted sums of shifted views: on a CPU several times faster than a depthwise convolution, on a GPU free of TF32.
    """
    length = volumes.shape[axis]
    if length == 1:
        return volumes
    places = torch.arange(-radius, length + radius, device=volumes.device) % (2 * length)
    padded = volumes.index_select(axis, torch.where(places < length, places, 2 * length - 1 - places))
    weights = kernels.reshape(len(volumes), -1, *(1,) * (volumes.dim() - 1))
    total = padded.narrow(axis, 0, length) * weights[:, 0]
    for tap in range(1, 2 * radius + 1):
        total.addcmul_(padded.narrow(axis, tap, length), weights[:, tap])
    return total
