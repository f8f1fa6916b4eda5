"""Owns the whole recipe and the checks that look across its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError

from fasttrain.recipe.acceleration_faults import faults_of_acceleration
from fasttrain.recipe.augment_spec import AugmentSpec
from fasttrain.recipe.data_spec import (
    CacheSpec,
    DataSpec,
    KFoldSplit,
    PercentileIntensity,
    PhantomSource,
    WindowIntensity,
    ZScoreIntensity,
)
from fasttrain.recipe.faults import sentences
from fasttrain.recipe.label_faults import faults_of_labels
from fasttrain.recipe.network_spec import DoseUNetSpec, Fault, MonaiNetworkSpec, NetworkSpec
from fasttrain.recipe.patch_spec import PatchSpec
from fasttrain.recipe.regions import Regions, regions_of
from fasttrain.recipe.run_spec import OutputSpec, ValidationSpec
from fasttrain.recipe.search_spec import SearchSpec
from fasttrain.recipe.searched import faults_of_search
from fasttrain.recipe.slices import faults_of_slices
from fasttrain.recipe.spec import FolderName, Spec
from fasttrain.recipe.task import OPENKBP_LEFT_RIGHT, TASKS, Task
from fasttrain.recipe.task_faults import faults_of_task
from fasttrain.recipe.training_spec import (
    AccelerationSpec,
    LossSpec,
    OptimizerSpec,
    ScheduleSpec,
    SGDSpec,
    TrainingSpec,
)
from fasttrain.wording import counted


class Recipe(Spec):
    """Everything that decides a run, but for the machine it runs on."""

    name: FolderName
    task: Literal["segmentation", "dose"]
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
    search: SearchSpec | None = None

    @property
    def dimensions(self) -> int:
        """2 or 3, by the patch."""
        return len(self.patch.size)

    @property
    def volume_dimensions(self) -> int:
        """Axes of the files: those of the patch, or 3 where it lies in a slice."""
        return self.dimensions if self.data.slices is None else 3

    @property
    def box(self) -> tuple[int, ...]:
        """The patch in the axes of a preprocessed volume, of whose slices it takes one."""
        return (1,) * (self.volume_dimensions - self.dimensions) + tuple(self.patch.size)

    @property
    def neighbours(self) -> int:
        """Slices on each side of a patch that it brings as further channels."""
        return 0 if self.data.slices is None else self.data.slices.neighbours

    @property
    def depth(self) -> int:
        """Slices that a patch is made of."""
        return 2 * self.neighbours + 1

    @property
    def reach(self) -> tuple[int, ...]:
        """The voxels of a volume that a patch is made of: `box`, and as deep as its slice and its neighbours are."""
        return (self.depth,) * (self.volume_dimensions - self.dimensions) + tuple(self.patch.size)

    @property
    def task_facts(self) -> Task:
        """What the task is, where it is not a number of channels."""
        return TASKS[self.task]

    @property
    def stored_channels(self) -> int:
        """Of a case's image as it is kept, cut and moved: the channels of the files and, for a dose, the dose."""
        return len(self.data.channels) + (self.task == "dose")

    @property
    def input_channels(self) -> int:
        """Of the network: the channels of the files, of each slice of a patch, and, for a dose, one a structure."""
        return self.depth * len(self.data.channels) + (len(self.data.classes) if self.task == "dose" else 0)

    @property
    def patch_channels(self) -> int:
        """Of a patch as it is cut and moved: the stored channels of each of its slices."""
        return self.depth * self.stored_channels

    @property
    def output_channels(self) -> int:
        """Of the network: one a class and the background, or a single one for a loss that takes a sigmoid of it; one a region;
        one dose.
        """
        return 1 if self.loss.one_channel and not self.data.regions else self.answer_channels

    @property
    def answer_channels(self) -> int:
        """Of what windows are summed to: probabilities of all classes, or of regions; one dose."""
        return 1 if self.task == "dose" else len(self.data.regions) or self.data.class_count

    @property
    def regions(self) -> Regions | None:
        """What `data.regions` mean; None where classes exclude each other."""
        return regions_of(self.data)

    @property
    def centre_lists(self) -> int:
        """Lists of voxels that patches are centred on: one a foreground class; for a dose the possible dose mask alone."""
        return 1 if self.task == "dose" else self.data.class_count - 1

    @property
    def left_right_axis(self) -> int | None:
        """The axis of a patch along which a dose's patients have left and right; None for other tasks."""
        if self.task != "dose":
            return None
        orientation = self.data.orientation
        return OPENKBP_LEFT_RIGHT if orientation is None else next(map(orientation.index, set("RL") & set(orientation)))

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """(left, right) places in `data.class_names` of paired organs, whose structures change places in a mirrored patch."""
        names = self.data.class_names
        pairs = ((left, f"Right{left.removeprefix('Left')}") for left in names if left.startswith("Left"))
        return tuple((names.index(left), names.index(right)) for left, right in pairs if right in names)

    @property
    def data_name(self) -> str:
        """The folder under `$FASTTRAIN_DATA` or `./data` that holds the set."""
        return self.data.name or self.name


def faults_across(recipe: Recipe) -> Iterator[Fault]:
    """What is wrong in a recipe whose every section is right by itself."""
    yield from _faults_of_dimensions(recipe)
    yield from _faults_of_data(recipe)
    # A dose has no labels, and is told so by its task
    if recipe.task != "dose":
        yield from faults_of_labels(recipe.data)
    yield from faults_of_task(recipe)
    yield from faults_of_slices(recipe)
    yield from _faults_of_network(recipe)
    yield from _faults_of_loss(recipe)
    yield from _faults_of_axes(recipe)
    yield from faults_of_acceleration(recipe)
    if isinstance(recipe.optimizer, SGDSpec) and recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        yield ("optimizer", "nesterov"), "needs a momentum above 0; set optimizer.nesterov: false or a momentum"
    yield from faults_of_search(recipe, _faults_of_values)


def _faults_of_dimensions(recipe: Recipe) -> Iterator[Fault]:
    """A patch for planes in a recipe that is otherwise for volumes; first, since what follows hangs on it."""
    if recipe.volume_dimensions == 3 or recipe.task == "dose":
        return
    spacing, flip = recipe.data.spacing, recipe.augment.flip
    signs = ["data.spacing has 3"] if spacing is not None and len(spacing) == 3 else []
    signs += ["augment.flip names axis 2"] if flip is not None and 2 in flip.axes else []
    signs += ["validation.mirror names axis 2"] if 2 in recipe.validation.mirror else []
    if signs:
        yield (
            ("patch", "size"),
            f"has 2 values, but {' and '.join(signs)}, as for volumes; give 3, or cut the volumes by data.slices; "
            "where the images are planes, mend those keys",
        )


def _faults_of_values(raw: dict[str, Any]) -> list[Fault]:
    """Of a whole recipe as plain values."""
    try:
        return list(faults_across(Recipe.model_validate(raw)))
    except ValidationError as error:
        return sentences(error, raw, Recipe)


def _faults_of_data(recipe: Recipe) -> Iterator[Fault]:
    data, dimensions = recipe.data, recipe.volume_dimensions
    for value in data.classes:
        if not 1 <= value <= 255:
            yield ("data", "classes", value), f"label values are whole numbers from 1 to 255, found {value}"
    if len(set(data.classes.values())) != len(data.classes):
        yield ("data", "classes"), "two classes have the same name"
    if (
        data.spacing is not None
        and len(data.spacing) != dimensions
        and (recipe.volume_dimensions, len(data.spacing)) != (2, 3)
    ):
        yield (
            ("data", "spacing"),
            f"has {counted(len(data.spacing), 'value')}, but patch.size has {dimensions}, {list(recipe.patch.size)}; give "
            "both as many"
            if data.slices is None
            else f"has {counted(len(data.spacing), 'value')}, but data.slices are cut out of volumes, which have 3 axes; give 3",
        )
    intensity = data.intensity
    if isinstance(intensity, WindowIntensity | PercentileIntensity) and intensity.low >= intensity.high:
        yield ("data", "intensity", "low"), f"{intensity.low:g} is not below high, {intensity.high:g}"
    if isinstance(intensity, ZScoreIntensity) and intensity.background != "zero" and not intensity.nonzero:
        yield ("data", "intensity", "background"), "is left out by nonzero: true alone; set that too, or leave this out"
    split = data.split
    if isinstance(split, KFoldSplit) and split.fold >= split.folds:
        yield ("data", "split", "fold"), f"{split.fold} is not one of the folds 0 to {split.folds - 1}"
    for key, default in _SMART_ALONE.items():
        if data.cache.kind != "smart" and getattr(data.cache, key) != default:
            yield (
                ("data", "cache", key),
                f"is for data.cache.kind: smart, and the kind is {data.cache.kind}; set that, or leave this out",
            )
    if data.cache.shard == "on" and data.cache.kind not in ("auto", "gpu"):
        yield (
            ("data", "cache", "shard"),
            f"is for data.cache.kind: gpu, and the kind is {data.cache.kind}; set that, or leave this out",
        )
    if isinstance(data.source, PhantomSource) and (len(data.channels) != 1 or data.classes.keys() != {1, 2}):
        yield ("data", "source"), "phantoms have one channel and the label values 1 and 2"


_SMART_ALONE = {
    key: CacheSpec.model_fields[key].default for key in ("cache_share", "cache_cases", "replace_rate", "shuffle_seed")
}
"""What no other cache looks at, with the value that it has where nobody set it."""


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
    if not isinstance(network, MonaiNetworkSpec | DoseUNetSpec) and recipe.patch.size == factors:
        yield from _faults_of_norm(network.norm, recipe.training.batch_size, factors)


def _faults_of_norm(norm: str, batch_size: int, factors: tuple[int, ...]) -> Iterator[Fault]:
    """torch refuses to normalise a single value, and the lowest stage has one voxel a patch."""
    larger = f"use a larger patch, such as {[2 * factor for factor in factors]}"
    if norm == "instance":
        yield (
            ("patch", "size"),
            f"leaves one voxel at the lowest stage, too few for network.norm: instance; {larger}",
        )
    if norm == "batch" and batch_size == 1:
        yield (
            ("patch", "size"),
            "leaves one voxel at the lowest stage, too few for network.norm: batch with a training.batch_size of 1; "
            f"{larger}, or a larger batch",
        )


def _faults_of_loss(recipe: Recipe) -> Iterator[Fault]:
    loss, classes = recipe.loss, len(recipe.data.classes)
    if recipe.data.regions and recipe.task != "dose":
        yield from _faults_of_region_loss(recipe)
    elif recipe.task == "segmentation" and loss.one_channel and classes > 1:
        yield (
            ("loss", "kind"),
            f"{loss.kind} is for one foreground class, and data.classes has {classes}; use dice_ce, or declare one class",
        )
    if loss.weights and not any(getattr(loss, weight) for weight in loss.weights):
        yield ("loss",), f"{' and '.join(loss.weights)} are both 0; at least one must be above"


def _faults_of_region_loss(recipe: Recipe) -> Iterator[Fault]:
    loss = recipe.loss
    if not loss.by_regions and loss.kind in recipe.task_facts.losses:
        yield (
            ("loss", "kind"),
            f"{loss.kind} takes the softmax of classes that exclude each other, and data.regions may overlap; use bce_dice, or "
            "dice, dice_focal, generalised_dice or tversky",
        )
    if getattr(loss, "include_background", False):
        yield (
            ("loss", "include_background"),
            "has no meaning with data.regions, whose channels are all regions; leave it out",
        )


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
