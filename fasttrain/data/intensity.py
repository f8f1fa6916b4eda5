"""Owns the intensity step: MONAI's transforms, and what they leave open for flat images."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, ScaleIntensityRange

from fasttrain.recipe.data_spec import IntensitySpec, PercentileIntensity, WindowIntensity, ZScoreIntensity


class IntensityStep(Protocol):
    """Maps [channel, *spatial] float32 to the same shape, in place or not."""

    def __call__(self, image: MetaTensor) -> MetaTensor: ...


def intensity_step(spec: IntensitySpec) -> IntensityStep | None:
    """The step for `data.intensity`; None keeps the values of the file."""
    if isinstance(spec, WindowIntensity):
        return ScaleIntensityRange(a_min=spec.low, a_max=spec.high, b_min=0.0, b_max=1.0, clip=True)
    if isinstance(spec, ZScoreIntensity):
        return _ZScore(spec)
    if isinstance(spec, PercentileIntensity):
        return _Percentiles(spec)
    return None


class _ZScore:
    """A flat channel gives zeros: its standard deviation is rounding noise, by which MONAI would divide."""

    def __init__(self, spec: ZScoreIntensity) -> None:
        self.nonzero = spec.nonzero
        self._normalize = NormalizeIntensity(nonzero=spec.nonzero, channel_wise=True)

    def __call__(self, image: MetaTensor) -> MetaTensor:
        flat = [_is_flat(channel, self.nonzero) for channel in image.as_tensor()]
        normalized: MetaTensor = self._normalize(image)
        for index, is_flat in enumerate(flat):
            if is_flat:
                normalized[index] = 0.0
        return normalized


class _Percentiles:
    """Where both percentiles are one value, the limit of the mapping: above it 1, else 0."""

    def __init__(self, spec: PercentileIntensity) -> None:
        self.spec = spec

    def __call__(self, image: MetaTensor) -> MetaTensor:
        for channel in image.as_tensor():
            low, high = (float(one) for one in np.percentile(channel.numpy(), (self.spec.low, self.spec.high)))
            if low == high:
                channel.copy_((channel > high).to(channel.dtype))
            else:
                scale = ScaleIntensityRange(a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True)
                channel.copy_(scale(channel))
        return image


def _is_flat(channel: torch.Tensor, nonzero: bool) -> bool:
    """Whether all (nonzero) voxels have one value."""
    values = channel.reshape(-1)
    counted = values != 0 if nonzero else torch.ones_like(values, dtype=torch.bool)
    value = values[counted.to(torch.uint8).argmax()]
    return bool(((values == value) | ~counted).all())
