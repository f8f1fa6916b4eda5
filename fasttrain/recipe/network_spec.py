"""Owns the `network` section: what each network takes, what it demands of the patch, and what cannot be built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fasttrain.recipe.spec import Float, NonNegativeInt, PositiveInt, Spec
from fasttrain.wording import counted

Fault = tuple[tuple[str | int, ...], str]
"""A path and the sentence that says what is wrong there; within this module the path begins below `network`."""

PerAxis = PositiveInt | tuple[PositiveInt, ...]
"""One number for all axes, or one an axis."""

SEGRESNET_GROUPS = 8
"""Of SegResNet's group norm, as its authors have it."""


def per_axis(value: PerAxis, dimensions: int) -> tuple[int, ...]:
    """Spells a number out for every axis; raises ValueError where the list has another length."""
    if isinstance(value, int):
        return (value,) * dimensions
    if len(value) != dimensions:
        raise ValueError(f"{list(value)} has {counted(len(value), 'value')} for the {dimensions} axes of patch.size")
    return tuple(value)


def _faults_per_axis(path: tuple[str | int, ...], value: PerAxis, dimensions: int) -> Iterator[Fault]:
    try:
        per_axis(value, dimensions)
    except ValueError as error:
        yield path, str(error)


def _faults_of_strides(features: tuple[int, ...], strides: tuple[PerAxis, ...], dimensions: int) -> Iterator[Fault]:
    levels = len(features)
    if len(strides) != levels - 1:
        yield (
            ("strides",),
            f"has {counted(len(strides), 'entry', 'entries')} for {levels} features; "
            f"{levels - 1} are needed, one between each two",
        )
    for index, stride in enumerate(strides):
        yield from _faults_per_axis(("strides", index), stride, dimensions)


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

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        yield from _faults_of_strides(self.features, self.strides, dimensions)


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

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        levels = len(self.features)
        wrong = list(_faults_of_strides(self.features, self.strides, dimensions))
        wrong_kernels = list(_faults_per_axis(("kernels",), self.kernels, dimensions))
        yield from wrong
        yield from wrong_kernels
        if self.deep_supervision > levels - 2:
            yield (
                ("deep_supervision",),
                f"{counted(self.deep_supervision, 'head')}, but {levels} stages have room for {max(levels - 2, 0)}",
            )
        if not wrong_kernels and not any(len(path) > 1 for path, _ in wrong):
            yield from self._faults_of_kernels(dimensions)

    def _faults_of_kernels(self, dimensions: int) -> Iterator[Fault]:
        """Same-size padding exists for odd kernels alone, and for strides of at most the kernel and one."""
        kernel = per_axis(self.kernels, dimensions)
        for axis, size in enumerate(kernel):
            if size % 2 == 0:
                yield ("kernels",), f"{size} on axis {axis} is even; use an odd kernel such as {size + 1}"
        for index, stride in enumerate(per_axis(stride, dimensions) for stride in self.strides):
            for axis, (step, size) in enumerate(zip(stride, kernel, strict=True)):
                if step > size + 1:
                    yield (
                        ("strides", index),
                        f"{step} on axis {axis} is too large for a kernel of {size}; "
                        f"use at most {size + 1}, or a larger network.kernels",
                    )


class SegResNetSpec(Spec):
    """MONAI's SegResNet (Myronenko 2018), without its autoencoder branch: residual blocks, upsampling by interpolation.

    `blocks_down` has one entry a stage, each with half the resolution and twice the features of the one before;
    `blocks_up` one between each two. `norm: group` has groups of an eighth of the features.
    """

    kind: Literal["segresnet"]
    init_filters: PositiveInt = 16
    blocks_down: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = (1, 2, 2, 4)
    blocks_up: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 1, 1)
    norm: Literal["batch", "instance", "group"] = "group"
    dropout: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.0

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """The factor by which each axis shrinks on the way to the lowest stage."""
        return (2 ** (len(self.blocks_down) - 1),) * dimensions

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        stages, filters = len(self.blocks_down), self.init_filters
        if len(self.blocks_up) != stages - 1:
            yield (
                ("blocks_up",),
                f"has {counted(len(self.blocks_up), 'entry', 'entries')} for {stages} stages; "
                f"{stages - 1} are needed, one between each two",
            )
        if self.norm == "group" and filters % SEGRESNET_GROUPS:
            yield (
                ("init_filters",),
                f"{filters} is not a multiple of {SEGRESNET_GROUPS}, the groups of network.norm: group; "
                f"use {_multiples_near(filters, SEGRESNET_GROUPS)}",
            )


class SwinUNETRSpec(Spec):
    """MONAI's Swin UNETR (Hatamizadeh et al. 2022): shifted-window attention in five steps of half the resolution.

    `depths` and `num_heads` have one entry for each of the four attention stages; stage i has `feature_size` × 2^i features.
    """

    kind: Literal["swinunetr"]
    feature_size: PositiveInt = 24
    depths: Annotated[tuple[PositiveInt, ...], Field(min_length=4, max_length=4)] = (2, 2, 2, 2)
    num_heads: Annotated[tuple[PositiveInt, ...], Field(min_length=4, max_length=4)] = (3, 6, 12, 24)
    norm: Literal["batch", "instance"] = "instance"

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """The factor by which each axis shrinks: by 2 when cut into tokens and by 2 after each of the four stages."""
        return (32,) * dimensions

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        size = self.feature_size
        if size % 12:
            yield ("feature_size",), f"{size} is not a multiple of 12; use {_multiples_near(size, 12)}"
            return
        for stage, heads in enumerate(self.num_heads):
            if (size << stage) % heads:
                yield ("num_heads", stage), f"{heads} heads do not divide the {size << stage} features of that stage"


class DoseUNetSpec(Spec):
    """The U-Net of OpenKBP's published baseline: convolutions of 4³ with stride 2 down and up again, no others.

    `features` has one entry a level, each with half the resolution of the one before; the way up mirrors it. The lowest level
    has no norm. Each second level on the way up drops whole channels with the probability `dropout`. The answer is smoothed by
    a mean over 3³ voxels.
    """

    kind: Literal["dose_unet"]
    features: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = (64, 128, 256, 512, 512, 512)
    norm: Literal["batch", "instance"] = "batch"
    dropout: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.2

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """The factor by which each axis shrinks on the way to the lowest level."""
        return (2 ** len(self.features),) * dimensions

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        yield from ()


def _check_plain(values: dict[str, Any]) -> dict[str, Any]:
    """A date or a set is YAML too, but no argument, and the recipe could not be written out again."""

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(item, f"{path}[{index}]")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} should be a finite number, found {value}")
        elif not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"{path} should be a number, text, true, false, null or a list of those, found {value!r}")

    for key, item in values.items():
        visit(item, key)
    return values


class MonaiNetworkSpec(Spec):
    """Any segmentation network of `monai.networks.nets`, by the name of its class and the arguments it takes.

    The numbers of axes, inputs and outputs, and the size of the image where the class asks for it, are filled in.
    """

    kind: Literal["monai"]
    name: str
    arguments: Annotated[dict[str, Any], AfterValidator(_check_plain)] = Field(default_factory=dict)

    def downsampling(self, dimensions: int) -> tuple[int, ...]:
        """1: what such a network demands of the patch is only known once it is built."""
        return (1,) * dimensions

    def faults(self, dimensions: int) -> Iterator[Fault]:
        """What is wrong in the section for a patch of `dimensions` axes."""
        if not self.name.isidentifier():
            yield ("name",), f"should be the name of a class in monai.networks.nets such as UNETR, found {self.name!r}"


def _multiples_near(value: int, factor: int) -> str:
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"{below} or {above}" if below else f"{above}"


NetworkSpec = Annotated[
    UNetSpec | DynUNetSpec | SegResNetSpec | SwinUNETRSpec | DoseUNetSpec | MonaiNetworkSpec,
    Field(discriminator="kind"),
]
