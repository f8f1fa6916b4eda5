"""Owns the gamma curve: values mapped to 0…1 by their own range, raised to a power, mapped back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, around_one, channel_mean, drawn, happens, per_sample, sent, uniform
from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_table import Rows
from fasttrain.recipe.augment_spec import GammaSpec


class Gamma:
    """Powers are drawn from `low…high`, one a channel."""

    name = "gamma"
    flag = columns.GAMMA
    column = columns.POWER

    def __init__(self, spec: GammaSpec) -> None:
        self.spec = spec

    def draw(self, channels: int, chances: Chances) -> Draw:
        """power: [sample, channel]."""
        values = chances.numbers(self.name, 1 + (2 if self.spec.balanced else 1) * channels)
        spread = around_one if self.spec.balanced else uniform
        active = happens(self.spec.probability, values[:, 0])
        return drawn(active=active, power=spread(self.spec.low, self.spec.high, values[:, 1:]))

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """One power a channel."""
        rows.act(self.flag, draw["active"].numpy()[:, None])
        rows.floats[..., self.column] = draw["power"].numpy()

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """Keeps each channel's smallest and largest value or, with `retain_stats`, its mean and standard deviation.

        A constant channel stays as it is.
        """
        axes = tuple(range(2, image.dim()))
        low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
        span = (high - low).clamp_min(torch.finfo(image.dtype).tiny)
        power = per_sample(sent(draw["power"], image.device), image)
        # x^p as exp(p log x): torch's pow gives other bits where a thread's share of the voxels ends
        curved = ((image - low) / span).clamp_(0.0, 1.0).log_().mul_(power).exp_().mul_(high - low).add_(low)
        return _with_the_stats_of(image, curved) if self.spec.retain_stats else curved


def _with_the_stats_of(image: Tensor, curved: Tensor) -> Tensor:
    mean, curved_mean = channel_mean(image), channel_mean(curved)
    std = channel_mean((image - mean).square_()).sqrt_()
    curved = curved.sub_(curved_mean)
    # nnU-Net's own floor: a constant channel has no spread to restore
    curved_std = channel_mean(curved.square()).sqrt_().clamp_min_(1e-7)
    return torch.addcmul(mean, curved, std / curved_std)
