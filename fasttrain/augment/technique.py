"""Owns what every augmentation is: parameters are drawn for a batch of samples, then applied to it.

Drawing and applying are apart (the TorchIO way) so that a draw is a function of the sample alone, however the samples are
batched and wherever the arithmetic runs. Each technique draws under its own name, so that to add one changes no draw of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.kernels.intensity_table import Rows

Draw = dict[str, Tensor]
"""Parameters by name, on the CPU, with a first axis over samples. `active`, bool [sample], says whether to apply."""


class IntensityTechnique(Protocol):
    """Changes voxel values and leaves voxels where they are."""

    name: str

    def draw(self, channels: int, chances: Chances) -> Draw:
        """Parameters for each sample of `chances`."""

    def write(self, rows: Rows, draw: Draw, size: Sequence[int]) -> None:
        """Into the table that tells the kernels, which do what `apply` does, of a batch of patches of `size`."""

    def apply(self, image: Tensor, draw: Draw) -> Tensor:
        """image: [chosen, channel, *spatial] float32, the active samples only, may be changed in place; draw: theirs."""


class SpatialTechnique(Protocol):
    """Moves voxels by a linear map about the patch's centre; several are fused into one resampling."""

    name: str

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """Parameters for each sample of `chances`, among them its `matrix` [sample, dimensions, dimensions] float32.

        A matrix maps output offsets to input offsets, in voxels.
        """


def uniform(low: float, high: float, chances: np.ndarray) -> np.ndarray:
    """Float32 values evenly from low…high, one for each of `chances`."""
    return chances * (high - low) + low


def around_one(low: float, high: float, chances: np.ndarray) -> np.ndarray:
    """Float32 factors [sample, k] from low…high, half of them evenly from below 1 and half from above (nnU-Net's `BGContrast`).

    A range that lies on one side of 1 is drawn from evenly. chances: [sample, 2 k], the sides first.
    """
    half = chances.shape[1] // 2
    sides, shares = chances[:, :half], chances[:, half:]
    if high <= 1.0 or low >= 1.0:
        return uniform(low, high, shares)
    return np.where(sides < 0.5, low + shares * (1.0 - low), 1.0 + shares * (high - 1.0))


def happens(probability: float, chances: np.ndarray) -> np.ndarray:
    """Bools; chances are below 1 and never below 0, so that 0 and 1 are certain."""
    return chances < np.float32(probability)


def drawn(**values: np.ndarray) -> Draw:
    """As tensors, on the same memory."""
    return {name: torch.from_numpy(value) for name, value in values.items()}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Small values of the host's on the device, by way of pinned memory: from elsewhere a copy waits for all work before it."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


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
