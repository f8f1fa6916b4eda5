"""Owns the `network` section and what each network demands of the patch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fasttrain.recipe.spec import Float, NonNegativeInt, PositiveInt, Spec

PerAxis = PositiveInt | tuple[PositiveInt, ...]
"""One number for all axes, or one an axis."""


def per_axis(value: PerAxis, dimensions: int) -> tuple[int, ...]:
    """Spells a number out for every axis; raises ValueError where the list has another length."""
    if isinstance(value, int):
        return (value,) * dimensions
    if len(value) != dimensions:
        raise ValueError(f"{list(value)} has {len(value)} values for {dimensions} axes")
    return tuple(value)


class UNetSpec(Spec):
    """MONAI's UNet (Kerfoot et al. 2019): strided convolutions with residual units.

    `features` has one entry a level; `strides` one between each two levels.
    """

    kind: Literal["unet"]
    features: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = (16, 32, 64, 128)
    strides: tuple[PerAxis, ...] = (2, 2, 2)
    residual_units: NonNegativeInt = 2
    norm: Literal["batch", "instance"] = "instance"
    activation: Literal["relu", "prelu", "leaky_relu"] = "prelu"
    dropout: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.0

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """The factor by which each axis shrinks on the way to the lowest level."""
        return tuple(math.prod(per_axis(s, dimensions)[axis] for s in self.strides) for axis in range(dimensions))


class DynUNetSpec(Spec):
    """MONAI's DynUNet, the nnU-Net architecture (Isensee et al. 2021).

    `features` has one entry a stage; `strides` one between each two stages. `deep_supervision` is the number of lower
    decoder stages that have a head of their own while training.
    """

    kind: Literal["dynunet"]
    features: Annotated[tuple[PositiveInt, ...], Field(min_length=3)] = (32, 64, 128, 256)
    strides: tuple[PerAxis, ...] = (2, 2, 2)
    kernels: PerAxis = 3
    norm: Literal["batch", "instance"] = "instance"
    residual: bool = False
    deep_supervision: NonNegativeInt = 0
    dropout: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.0

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """The factor by which each axis shrinks on the way to the lowest stage."""
        return tuple(math.prod(per_axis(s, dimensions)[axis] for s in self.strides) for axis in range(dimensions))


NetworkSpec = Annotated[UNetSpec | DynUNetSpec, Field(discriminator="kind")]
