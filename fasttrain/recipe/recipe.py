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
from fasttrain.recipe.network_spec import Fault, MonaiNetworkSpec, NetworkSpec
from fasttrain.recipe.run_spec import OutputSpec, ValidationSpec
from fasttrain.recipe.spec import FolderName, Spec
from fasttrain.recipe.training_spec import (
    AccelerationSpec,
    LossSpec,
    OptimizerSpec,
    ScheduleSpec,
    SGDSpec,
    TrainingSpec,
)


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
    def output_channels(self) -> int:
        """Of the network: one a class and the background, or a single one for a loss that takes a sigmoid of it."""
        return 1 if self.loss.one_channel else self.data.class_count

    @property
    def data_name(self) -> str:
        """The folder under `$FASTTRAIN_DATA` or `./data` that holds the set."""
        return self.data.name or self.name


def faults_across(recipe: Recipe) -> Iterator[Fault]:
    """What is wrong in a recipe whose every section is right by itself."""
    yield from _faults_of_data(recipe)
    yield from _faults_of_network(recipe)
    yield from _faults_of_loss(recipe)
    yield from _faults_of_axes(recipe)
    if isinstance(recipe.optimizer, SGDSpec) and recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        yield ("optimizer", "nesterov"), "needs a momentum above 0; set optimizer.nesterov: false or a momentum"


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
    wrong_strides = False
    for path, text in network.faults(dimensions):
        wrong_strides |= path[0] == "strides" and len(path) > 1
        yield ("network", *path), text
    if wrong_strides:
        return
    factors = network.downsampling(dimensions)
    yield from _faults_of_patch(recipe.patch.size, factors)
    if not isinstance(network, MonaiNetworkSpec) and recipe.patch.size == factors:
        yield from _faults_of_norm(network.norm, recipe.training.batch_size)


def _faults_of_norm(norm: str, batch_size: int) -> Iterator[Fault]:
    """torch refuses to normalise a single value, and the lowest stage has one voxel a patch."""
    if norm == "instance":
        yield (
            ("patch", "size"),
            "leaves one voxel at the lowest stage, too few for network.norm: instance; use a larger patch",
        )
    if norm == "batch" and batch_size == 1:
        yield (
            ("patch", "size"),
            "leaves one voxel at the lowest stage, too few for network.norm: batch with a training.batch_size of 1; "
            "use a larger patch or batch",
        )


def _faults_of_loss(recipe: Recipe) -> Iterator[Fault]:
    loss, classes = recipe.loss, len(recipe.data.classes)
    if loss.one_channel and classes > 1:
        yield (
            ("loss", "kind"),
            f"{loss.kind} is for one foreground class, and data.classes has {classes}; use dice_ce, or declare one class",
        )
    if loss.weights and not any(getattr(loss, weight) for weight in loss.weights):
        yield ("loss",), f"{' and '.join(loss.weights)} are both 0; at least one must be above"


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
