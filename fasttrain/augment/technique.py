"""Owns what every augmentation is: parameters are drawn for one sample, then applied to a whole batch.

Drawing and applying are apart (the TorchIO way) so that a draw is a function of the sample alone, however the samples are
batched and wherever the arithmetic runs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Draw = dict[str, Tensor]
"""Parameters by name, on the CPU; of one sample, or stacked along a first axis for a batch. `active` says whether to apply."""


class IntensityTechnique(Protocol):
    """Changes voxel values and leaves voxels where they are."""

    def draw(self, channels: int, generator: torch.Generator) -> Draw:
        """Parameters for one sample."""

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """image: [chosen, channel, *spatial] float32, the active samples only, may be changed in place; draw: theirs."""


class SpatialTechnique(Protocol):
    """Moves voxels by a linear map about the patch's centre; several are fused into one resampling."""

    def draw(self, dimensions: int, generator: torch.Generator) -> Draw:
        """Parameters for one sample, its `matrix` [dimensions, dimensions] among them: output → input offsets in voxels."""


def uniform(low: float, high: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Float32 values evenly from low…high."""
    return torch.rand(size, generator=generator) * (high - low) + low


def around_one(low: float, high: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Float32 factors from low…high, half of them evenly from below 1 and half from above (nnU-Net's `BGContrast`).

    A range that lies on one side of 1 is drawn from evenly. Two values are drawn for each factor in every case.
    """
    below = torch.rand(size, generator=generator) < 0.5
    share = torch.rand(size, generator=generator)
    if high <= 1.0 or low >= 1.0:
        return share * (high - low) + low
    return torch.where(below, low + share * (1.0 - low), 1.0 + share * (high - 1.0))


def happens(probability: float, generator: torch.Generator) -> Tensor:
    """A bool of one element; drawn even where the outcome is certain, so that later draws do not depend on settings."""
    return torch.rand((), generator=generator) < probability


def per_sample(values: Tensor, image: Tensor) -> Tensor:
    """Reshapes [sample] or [sample, channel] so that it broadcasts over [sample, channel, *spatial]."""
    return values.reshape(*values.shape, *(1,) * (image.dim() - values.dim()))


def channel_mean(image: Tensor) -> Tensor:
    """The mean of each channel, [sample, channel, 1, …], one axis after another.

    torch sums a lone result with all threads, in an order that depends on their number: a patch would then have other bits in
    a worker, which has one thread, than in the trainer. Reduced by axis, only short sums are left for the last step.
    """
    for axis in reversed(range(2, image.dim())):
        image = image.mean(axis, keepdim=True)
    return image
