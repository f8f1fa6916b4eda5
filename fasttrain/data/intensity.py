"""Owns the intensity step: the arithmetic of MONAI's transforms in place, and what they leave open for flat images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from fasttrain.data.grids import slabs
from fasttrain.recipe.data_spec import IntensitySpec, PercentileIntensity, WindowIntensity, ZScoreIntensity


class IntensityStep(Protocol):
    """Maps [channel, *spatial] float32 in place."""

    def __call__(self, image: torch.Tensor) -> None: ...


def intensity_step(spec: IntensitySpec) -> IntensityStep | None:
    """The step for `data.intensity`; None keeps the values of the file."""
    if isinstance(spec, WindowIntensity):
        return _Window(spec)
    if isinstance(spec, ZScoreIntensity):
        return _ZScore(spec)
    if isinstance(spec, PercentileIntensity):
        return _Percentiles(spec)
    return None


class _Window:
    """MONAI's ScaleIntensityRange to [0, 1] with clip, which would hold three more copies of the image."""

    def __init__(self, spec: WindowIntensity) -> None:
        self.spec = spec

    def __call__(self, image: torch.Tensor) -> None:
        image.sub_(self.spec.low).div_(self.spec.high - self.spec.low).clamp_(0.0, 1.0)


class _ZScore:
    """MONAI's NormalizeIntensity, but for three things. A flat channel gives zeros: its standard deviation is rounding noise, by
    which MONAI would divide. The sums are NumPy's: torch's differ in their last bits with the number of threads, so that a
    volume would hang on who prepared it. And it goes slab by slab: masks, indices and float64 of a whole volume take eight
    times its own memory.
    """

    def __init__(self, spec: ZScoreIntensity) -> None:
        self.nonzero = spec.nonzero
        self.lowest = spec.background == "lowest"

    def __call__(self, image: torch.Tensor) -> None:
        for channel in image.numpy():
            self._scale(channel)

    def _scale(self, channel: np.ndarray) -> None:
        if self.nonzero and self.lowest:
            self._clear_lowest(channel)
        count = sum(values.size for values in self._counted(channel))
        if not count:
            return
        low = min(float(values.min()) for values in self._counted(channel) if values.size)
        high = max(float(values.max()) for values in self._counted(channel) if values.size)
        mean, std = low, 1.0
        if low != high:
            mean = math.fsum(values.sum(dtype=np.float64) for values in self._counted(channel)) / count
            squares = (np.square(values - np.float64(mean)).sum() for values in self._counted(channel))
            std = math.sqrt(math.fsum(squares) / count)
        for rows in slabs(channel.shape):
            part = channel[rows]
            scaled = (part - np.float64(mean)) / np.float64(std)
            np.copyto(part, scaled, casting="same_kind", where=part != 0 if self.nonzero else True)

    @staticmethod
    def _clear_lowest(channel: np.ndarray) -> None:
        """Moves values so that 0 is the lowest of them: the background, which none of the others can be taken for."""
        channel -= channel.min()

    def _counted(self, channel: np.ndarray) -> Iterator[np.ndarray]:
        """The voxels that count, slab by slab, in the order of their indices."""
        for rows in slabs(channel.shape):
            part = channel[rows]
            yield part[part != 0] if self.nonzero else np.ravel(part)


class _Percentiles:
    """Where both percentiles are one value, the limit of the mapping: above it 1, else 0."""

    def __init__(self, spec: PercentileIntensity) -> None:
        self.spec = spec

    def __call__(self, image: torch.Tensor) -> None:
        for channel in image:
            low, high = (float(one) for one in np.percentile(channel.numpy(), (self.spec.low, self.spec.high)))
            if low == high:
                channel.copy_(channel > high)
            else:
                channel.sub_(low).div_(high - low).clamp_(0.0, 1.0)
