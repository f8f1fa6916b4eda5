"""Owns the whole recipe and the checks that look across its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fasttrain.recipe.augment_spec import AugmentSpec
from fasttrain.recipe.data_spec import (
    DataSpec,
    KFoldSplit,
    PatchSpec,
    PercentileIntensity,
    PhantomSource,
    WindowIntensity,
)
from fasttrain.recipe.network_spec import NetworkSpec, PerAxis, per_axis
from fasttrain.recipe.run_spec import OutputSpec, ValidationSpec
from fasttrain.recipe.spec import FolderName, Spec
from fasttrain.recipe.training_spec import (
    AccelerationSpec,
    DiceCELossSpec,
    LossSpec,
    OptimizerSpec,
    ScheduleSpec,
    SGDSpec,
    TrainingSpec,
)

Fault = tuple[tuple[str | int, ...], str]
"""A recipe path and the sentence that says what is wrong there."""


class Recipe(Spec):
    """Everything that decides a run, but for the machine it runs on."""

    name: FolderName
    task: Literal["segmentation"]
    data: DataSpec
    patch: PatchSpec
    augment: AugmentSpec = AugmentSpec()
    network: NetworkSpec
    loss: LossSpec
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    training: TrainingSpec
    acceleration: AccelerationSpec = AccelerationSpec()
    validation: ValidationSpec = ValidationSpec()
    output: OutputSpec = OutputSpec()

    @property
    def dimensions(self) -> int:
        """2 or 3, by the patch."""
        return len(self.patch.size)

    @property
    def data_name(self) -> str:
        """The folder under `$FASTTRAIN_DATA` or `./data` that holds the set."""
        return self.data.name or self.name


def faults_across(recipe: Recipe) -> Iterator[Fault]:
    """What is wrong in a recipe whose every section is right by itself."""
    yield from _faults_of_data(recipe)
    yield from _faults_of_network(recipe)
    yield from _faults_of_axes(recipe)
    if isinstance(recipe.optimizer, SGDSpec) and recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        yield ("optimizer", "nesterov"), "needs a momentum above 0; set optimizer.nesterov: false or a momentum"
    loss = recipe.loss
    if isinstance(loss, DiceCELossSpec) and loss.dice_weight == 0 and loss.ce_weight == 0:
        yield ("loss",), "dice_weight and ce_weight are both 0; at least one must be above"


def _faults_of_data(recipe: Recipe) -> Iterator[Fault]:
    data, dimensions = recipe.data, recipe.dimensions
    for value in data.classes:
        if not 1 <= value <= 255:
            yield ("data", "classes", value), f"label values are whole numbers from 1 to 255, found {value}"
    if len(set(data.classes.values())) != len(data.classes):
        yield ("data", "classes"), "two classes have the same name"
    if data.spacing is not None and len(data.spacing) != dimensions:
        yield ("data", "spacing"), f"has {len(data.spacing)} values, but the patch has {dimensions} axes"
    intensity = data.intensity
    if isinstance(intensity, WindowIntensity | PercentileIntensity) and intensity.low >= intensity.high:
        yield ("data", "intensity", "low"), f"{intensity.low:g} is not below high, {intensity.high:g}"
    split = data.split
    if isinstance(split, KFoldSplit) and split.fold >= split.folds:
        yield ("data", "split", "fold"), f"{split.fold} is not one of the folds 0 to {split.folds - 1}"
    if isinstance(data.source, PhantomSource) and (len(data.channels) != 1 or data.classes.keys() != {1, 2}):
        yield ("data", "source"), "phantoms have one channel and the label values 1 and 2"


def _faults_of_network(recipe: Recipe) -> Iterator[Fault]:
    network, dimensions = recipe.network, recipe.dimensions
    levels = len(network.features)
    if len(network.strides) != levels - 1:
        yield (
            ("network", "strides"),
            f"has {len(network.strides)} entries for {levels} features; {levels - 1} are needed, one between each two",
        )
    wrong_axes = False
    for index, stride in enumerate(network.strides):
        for fault in _faults_per_axis(("network", "strides", index), stride, dimensions):
            wrong_axes = True
            yield fault
    if network.kind == "dynunet":
        yield from _faults_per_axis(("network", "kernels"), network.kernels, dimensions)
        if network.deep_supervision > levels - 2:
            yield (
                ("network", "deep_supervision"),
                f"{network.deep_supervision} heads, but {levels} stages have room for {max(levels - 2, 0)}",
            )
    if not wrong_axes:
        yield from _faults_of_patch(recipe.patch.size, network.downsampling(dimensions))


def _faults_per_axis(path: tuple[str | int, ...], value: PerAxis, dimensions: int) -> Iterator[Fault]:
    try:
        per_axis(value, dimensions)
    except ValueError as error:
        yield path, str(error)


def _faults_of_patch(size: tuple[int, ...], factors: tuple[int, ...]) -> Iterator[Fault]:
    for axis, (length, factor) in enumerate(zip(size, factors, strict=True)):
        if length % factor == 0:
            continue
        below, above = length // factor * factor, -(-length // factor) * factor
        choice = f"{below} or {above}" if below else f"{above}"
        yield ("patch", "size", axis), f"{length} is not a multiple of {factor}; use {choice}"


def _faults_of_axes(recipe: Recipe) -> Iterator[Fault]:
    dimensions = recipe.dimensions
    lists: dict[tuple[str | int, ...], tuple[int, ...]] = {("validation", "mirror"): recipe.validation.mirror}
    if recipe.augment.flip is not None:
        lists[("augment", "flip", "axes")] = recipe.augment.flip.axes
    for path, axes in lists.items():
        for index, axis in enumerate(axes):
            if axis >= dimensions:
                yield (
                    (*path, index),
                    f"axis {axis} does not exist; a {dimensions}D patch has axes 0 to {dimensions - 1}",
                )
        if len(set(axes)) != len(axes):
            yield path, "names an axis twice"
