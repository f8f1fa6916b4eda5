"""Owns the `augment` section: each technique with its probability a sample and its range; an absent one is off."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fasttrain.recipe.spec import Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, Probability, Spec


class FlipSpec(Spec):
    """Mirrors each of `axes` by itself with `probability`."""

    probability: Probability
    axes: tuple[NonNegativeInt, ...] = (0, 1, 2)


class RotateSpec(Spec):
    """Turns about each axis by an angle drawn from ±`degrees`."""

    probability: Probability
    degrees: Annotated[Float, Field(ge=0.0, le=180.0)] = 15.0


class ScaleSpec(Spec):
    """Zooms by a factor drawn from `low…high`, the same along all axes; above 1 magnifies."""

    probability: Probability
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


class ScaleIntensitySpec(Spec):
    """Multiplies each channel by a factor drawn from `low…high`."""

    probability: Probability
    low: PositiveFloat = 0.75
    high: PositiveFloat = 1.25


class GammaSpec(Spec):
    """Raises each channel, mapped to 0…1 by its own range, to a power drawn from `low…high`, and maps it back."""

    probability: Probability
    low: PositiveFloat = 0.7
    high: PositiveFloat = 1.5


class AugmentSpec(Spec):
    """Random changes of training patches; validation and prediction see none of them."""

    flip: FlipSpec | None = None
    rotate: RotateSpec | None = None
    scale: ScaleSpec | None = None
    noise: NoiseSpec | None = None
    shift_intensity: ShiftIntensitySpec | None = None
    scale_intensity: ScaleIntensitySpec | None = None
    gamma: GammaSpec | None = None
