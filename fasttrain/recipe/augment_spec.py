"""Owns the `augment` section: each technique with its probability a sample and its range; an absent one is off."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from fasttrain.recipe.spec import Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Spec

FOLD_FREE_SHARE = 0.4
"""How far a control point of a cubic B-spline may move, as a share of the points' distance, so that no fold can arise: 1/2.48
in 3D and 1/2.05 in 2D (Choi and Lee, Injectivity conditions of 2D and 3D uniform cubic B-spline functions, 2000)."""


class RangeSpec(Spec):
    """What is drawn from a range; the faulty end is named by the key that was written."""

    probability: Probability
    low: PositiveFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _in_order(self) -> RangeSpec:
        if self.low > self.high and "low" in self.model_fields_set:
            raise _fault(self, "low", f"{self.low:g} is above high, {self.high:g}")
        if self.low > self.high:
            raise _fault(self, "high", f"{self.high:g} is below low, {self.low:g}")
        return self


class FlipSpec(Spec):
    """Mirrors each of `axes` by itself with `probability`."""

    probability: Probability
    axes: tuple[NonNegativeInt, ...] = (0, 1, 2)


class RotateSpec(Spec):
    """Turns about each axis by an angle drawn from ±`degrees`."""

    probability: Probability
    degrees: Annotated[Float, Field(ge=0.0, le=180.0)] = 15.0


class ScaleSpec(RangeSpec):
    """Zooms by a factor drawn from `low…high`, the same along all axes; above 1 magnifies."""

    low: PositiveFloat = 0.85
    high: PositiveFloat = 1.15


class NoiseSpec(Spec):
    """Adds Gaussian noise whose standard deviation is drawn from 0…`std`."""

    probability: Probability
    std: NonNegativeFloat = 0.1


class ShiftIntensitySpec(Spec):
    """Adds an offset drawn from ±`offset` to each channel."""

    probability: Probability
    offset: NonNegativeFloat = 0.1


class ScaleIntensitySpec(RangeSpec):
    """Multiplies each channel by a factor drawn from `low…high`."""

    low: PositiveFloat = 0.75
    high: PositiveFloat = 1.25


class BlurSpec(RangeSpec):
    """Blurs with a Gaussian whose standard deviation, in voxels, is drawn from `low…high` for each channel and axis.

    `channel_probability` is the share of channels that a blurred sample has blurred.
    """

    low: PositiveFloat = 0.5
    high: Annotated[PositiveFloat, Field(le=16.0)] = 1.0
    channel_probability: Probability = 1.0


class BrightnessSpec(RangeSpec):
    """Multiplies each channel by a factor from `low…high`: half of them below 1 and half above, as nnU-Net draws them."""

    low: PositiveFloat = 0.75
    high: PositiveFloat = 1.25


class ContrastSpec(RangeSpec):
    """Stretches each channel about its mean by a factor from `low…high`: half of them below 1 and half above.

    With `preserve_range` what leaves the channel's former range is clipped to it.
    """

    low: PositiveFloat = 0.75
    high: PositiveFloat = 1.25
    preserve_range: bool = True


class LowResolutionSpec(RangeSpec):
    """Samples a channel down by a zoom drawn from `low…high` (nearest voxel) and up again (linearly).

    0.5 keeps every second voxel along each axis. `channel_probability` is the share of channels in an affected sample.
    """

    low: PositiveFloat = 0.5
    high: Annotated[PositiveFloat, Field(le=1.0)] = 1.0
    channel_probability: Probability = 1.0


class GammaSpec(RangeSpec):
    """Raises each channel, mapped to 0…1 by its own range, to a power drawn from `low…high`, and maps it back.

    `retain_stats` gives the channel its former mean and standard deviation again; `balanced` draws half of the powers below 1
    and half above, not evenly over the range. nnU-Net does both.
    """

    low: PositiveFloat = 0.7
    high: PositiveFloat = 1.5
    retain_stats: bool = False
    balanced: bool = False


class ElasticSpec(Spec):
    """Bends the patch: a cubic B-spline whose control points are moved at random.

    `cells` is the number of spans between control points along each axis: few bend slowly, many finely. Points move along each
    axis by a share of the patch's length drawn from ±`magnitude`: 0.05 of 128 voxels are 6.4 voxels. The voxels between move
    less: by about a fifth of `magnitude` in 3D and a quarter in 2D (root mean square), seldom by more than half.
    """

    probability: Probability
    magnitude: NonNegativeFloat = 0.08
    cells: Annotated[PositiveInt, Field(le=16)] = 4

    @model_validator(mode="after")
    def _without_folds(self) -> ElasticSpec:
        limit = FOLD_FREE_SHARE / self.cells
        if self.magnitude <= limit:
            return self
        where = "magnitude" if "magnitude" in self.model_fields_set else "cells"
        fewer = int(FOLD_FREE_SHARE / self.magnitude)
        cells = f", or {fewer} cell{'s' * (fewer > 1)}" if fewer else ""
        # Rounded down, so that the value named is one that is taken
        raise _fault(
            self,
            where,
            f"magnitude {self.magnitude:g} with {self.cells} cell{'s' * (self.cells > 1)} could fold the patch over itself; "
            f"use a magnitude of at most {math.floor(limit * 1000) / 1000:g}{cells}",
        )


class AugmentSpec(Spec):
    """Random changes of training patches; validation and prediction see none of them.

    Applied in this order, which is nnU-Net's (only mirroring, which it does last, comes before what changes intensities):
    elastic, rotate and scale in one resampling, flip, noise, blur, shift_intensity, scale_intensity, brightness, contrast,
    low_resolution, gamma_inverted (the gamma of the negative image), gamma.
    """

    flip: FlipSpec | None = None
    rotate: RotateSpec | None = None
    scale: ScaleSpec | None = None
    elastic: ElasticSpec | None = None
    noise: NoiseSpec | None = None
    blur: BlurSpec | None = None
    shift_intensity: ShiftIntensitySpec | None = None
    scale_intensity: ScaleIntensitySpec | None = None
    brightness: BrightnessSpec | None = None
    contrast: ContrastSpec | None = None
    low_resolution: LowResolutionSpec | None = None
    gamma_inverted: GammaSpec | None = None
    gamma: GammaSpec | None = None


def _fault(spec: Spec, key: str, sentence: str) -> ValidationError:
    """An error at one key of the section: a ValueError of pydantic's would lie at the section as a whole."""
    value = getattr(spec, key)
    detail = InitErrorDetails(type="value_error", loc=(key,), input=value, ctx={"error": ValueError(sentence)})
    return ValidationError.from_exception_data(type(spec).__name__, [detail])
