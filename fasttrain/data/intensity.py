"""Owns the intensity step: MONAI's transforms, and what they leave open for flat images."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import ScaleIntensityRange

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
    """MONAI's NormalizeIntensity, but for two things. A flat channel gives zeros: its standard deviation is rounding noise, by
    which MONAI would divide. And the sums are NumPy's: torch's differ in their last bits with the number of threads, so that a
    volume would hang on who prepared it.
    """

    def __init__(self, spec: ZScoreIntensity) -> None:
        self.nonzero = spec.nonzero

    def __call__(self, image: MetaTensor) -> MetaTensor:
        for channel in image.as_tensor():
            counted = channel != 0 if self.nonzero else torch.ones_like(channel, dtype=torch.bool)
            values = channel[counted].numpy()
            if values.size == 0:
                continue
            if values.min() == values.max():
                channel[counted] = 0.0
                continue
            mean, std = values.mean(dtype=np.float64), values.std(dtype=np.float64)
            channel[counted] = torch.from_numpy(((values - mean) / std).astype(np.float32))
        return image


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
