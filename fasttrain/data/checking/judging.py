"""Owns the judgement of one case: its facts against a recipe, every fault as a sentence, and what a report shows of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.data.checking.counts import beside_classes, class_voxels
from fasttrain.data.checking.facts import ChannelFacts, FileFacts, View
from fasttrain.data.checking.voxels import faults_of_voxels
from fasttrain.data.grids import reoriented, spacing_of
from fasttrain.data.labels import faults_of_values
from fasttrain.data.reading import (
    check_channels,
    check_file_count,
    check_label_axes,
    check_one_channel,
    check_same_grid,
    split_shape,
)
from fasttrain.data.volumes import directions, letters
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case, Grid

_DECLARED = "; declared are "


@dataclass(frozen=True)
class Terms:
    """What cases are judged by. `recipe` is None for a set that is looked at before there is one: then any class value from 1
    to 255 is sound, and `named` are the values that the set itself gives names.
    """

    data: DataSpec
    dimensions: int
    recipe: Recipe | None = None
    named: tuple[int, ...] = ()

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Terms:
        """The terms of training with a recipe."""
        return cls(recipe.data, recipe.volume_dimensions, recipe)

    @property
    def image_view(self) -> View:
        """How image files are looked at."""
        return View(self.dimensions)

    def label_view(self, case: Case) -> View:
        """How the label of a case is looked at."""
        return View(self.dimensions, True, self.data.spacing, self.data.orientation, case.drawn)


@dataclass(frozen=True)
class CaseFindings:
    """One case as it was judged.

    grid: of the image, None where no image could be read. minimum, maximum: of the finite voxels over all channels.
    ranges: (minimum, maximum) of each channel, None where it has no finite voxel. voxels: by value of `data.classes` and 0, None
    without a label that could be read. ignored: voxels of `data.ignore_label`, undeclared: voxels by a value of the file that is
    neither a class nor ignored; both None as voxels are. digests: one an image file; label_digest: of the label's
    voxels, None without one that could be read.
    """

    case: Case
    grid: Grid | None
    label_shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    label_dtype: str | None
    minimum: float | None
    maximum: float | None
    voxels: dict[int, int] | None
    digests: tuple[str, ...]
    label_digest: str | None
    ranges: tuple[tuple[float, float] | None, ...]
    ignored: int | None
    undeclared: dict[int, int] | None
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def content(self) -> str:
        """What the files hold, as 32 hexadecimal digits: voxels of images and label, and the grid they lie on."""
        affine = [] if self.grid is None else np.asarray(self.grid.affine, dtype=np.float64).round(6).tolist()
        told = repr([self.digests, self.label_digest, affine])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @property
    def empty(self) -> bool:
        """Whether the label holds no class: nothing but background and voxels to be ignored."""
        return self.voxels is not None and not any(count for value, count in self.voxels.items() if value)

    @property
    def all_ignored(self) -> bool:
        """Whether the label holds nothing but voxels to be ignored."""
        return self.empty and bool(self.ignored) and not (self.voxels or {}).get(0) and not self.undeclared

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """mm along the axes of the file."""
        return None if self.grid is None else tuple(map(float, spacing_of(self.grid.affine, len(self.grid.shape))))

    @property
    def orientation(self) -> str | None:
        """The letters of the file's axes; a plane has none."""
        if self.grid is None:
            return None
        if len(self.grid.shape) < 3:
            return "plane"
        ends = directions(self.grid.affine)
        return "unclear" if ends is None else letters(ends)


def judge(
    case: Case, images: Sequence[FileFacts], label: FileFacts | None, terms: Terms, pairing: Sequence[str] = ()
) -> CaseFindings:
    """All faults of a case at once. `images` are the facts of `case.images`, `label` those of `case.label`.

    pairing: what is wrong with which files the case has; of such a case each file is judged by itself.
    """
    faults: list[str] = list(pairing)
    grid = _judge_apart(case, images, terms, faults) if pairing else _judge_images(case, images, terms, faults)
    voxels: dict[int, int] | None = None
    if case.label is not None and label is not None:
        against = ((), None) if pairing else (images, grid)
        voxels = _judge_label(case, label, *against, terms, faults)
    lows = [one.minimum for facts in images for one in facts.channels if one.minimum is not None]
    highs = [one.maximum for facts in images for one in facts.channels if one.maximum is not None]
    decoded = bool(images) and all(facts.decoded for facts in images)
    values = label.values if label is not None and voxels is not None else None
    ignored, undeclared = (None, None) if values is None else beside_classes(values, terms.data)
    return CaseFindings(
        case=case,
        grid=grid,
        label_shape=label.shape if label is not None and label.decoded else None,
        dtypes=tuple(dict.fromkeys(facts.dtype for facts in images if facts.decoded)),
        label_dtype=label.dtype if label is not None and label.decoded else None,
        minimum=min(lows, default=None),
        maximum=max(highs, default=None),
        voxels=voxels,
        digests=tuple(facts.digest for facts in images) if decoded else (),
        label_digest=label.digest if label is not None and label.digest else None,
        ranges=tuple(_range(one) for facts in images for one in facts.channels),
        ignored=ignored,
        undeclared=undeclared,
        faults=tuple(dict.fromkeys(faults)),
        warnings=tuple(_warnings(case, voxels, label, terms)),
    )


def _range(channel: ChannelFacts) -> tuple[float, float] | None:
    return None if channel.minimum is None or channel.maximum is None else (channel.minimum, channel.maximum)


def _judge_apart(case: Case, images: Sequence[FileFacts], terms: Terms, faults: list[str]) -> Grid | None:
    """Of a case whose files do not pair: what is wrong with each file by itself, and the grid of the first."""
    first = None
    for path, facts in zip(case.images, images, strict=True):
        faults.extend(facts.faults)
        if facts.decoded and first is None:
            try:
                first = Grid(split_shape(path, facts.shape, terms.dimensions)[0], facts.matrix)
            except DataError as error:
                faults.extend(error.faults)
    return first


def _judge_images(case: Case, images: Sequence[FileFacts], terms: Terms, faults: list[str]) -> Grid | None:
    data = terms.data
    try:
        check_file_count(case, data)
    except DataError as error:
        faults.extend(error.faults)
    reference: tuple[Path, Grid] | None = None
    for number, (path, facts) in enumerate(zip(case.images, images, strict=True)):
        faults.extend(facts.faults)
        if not facts.decoded:
            continue
        try:
            spatial, found = split_shape(path, facts.shape, terms.dimensions)
            grid = Grid(spatial, facts.matrix)
            if len(images) == 1:
                reference = path, grid
                check_channels(path, facts.shape, found, data)
            else:
                check_one_channel(path, facts.shape, found)
                reference = reference or (path, grid)
                check_same_grid(path, _as_lies(grid, reference[1]), *reference)
        except DataError as error:
            faults.extend(error.faults)
            continue
        if number == 0 or len(images) > 1:
            names = data.channels if len(images) == 1 else data.channels[number : number + 1]
            faults.extend(faults_of_voxels(path, names, facts, data))
    if reference is not None:
        faults.extend(_faults_of_slices(*reference, terms))
    return None if reference is None else reference[1]


def _faults_of_slices(path: Path, grid: Grid, terms: Terms) -> list[str]:
    """A patch that is one voxel deep asks for slices."""
    patch = terms.recipe.patch.size if terms.recipe is not None else ()
    if len(patch) < 3 or 1 in patch or 1 not in grid.shape:
        return []
    size, shape = "×".join(map(str, patch)), "×".join(map(str, grid.shape))
    return [
        f"{path} has the shape {shape}, a single slice, but patch.size is {size}; give patch.size two values to train in 2D, or "
        "use volumes"
    ]


def _judge_label(
    case: Case, label: FileFacts, images: Sequence[FileFacts], grid: Grid | None, terms: Terms, faults: list[str]
) -> dict[int, int] | None:
    path = case.label
    assert path is not None
    faults.extend(label.faults)
    if label.decoded:
        try:
            _check_label_grid(case, path, images, label, grid, terms.dimensions)
        except DataError as error:
            faults.extend(error.faults)
    if label.values is None:
        return None
    values = [value for value, _ in label.values]
    found = np.array(values, dtype=np.int64 if max(map(abs, values)) < 1 << 62 else np.float64)
    wrong = faults_of_values(path, found, np.array([count for _, count in label.values]), terms.data)
    faults.extend(without_declared(fault) if terms.recipe is None else fault for fault in wrong)
    voxels = class_voxels(label.values, terms.data)
    if terms.recipe is None:
        return {value: count for value, count in voxels.items() if count or not value}
    return voxels


def _check_label_grid(
    case: Case, path: Path, images: Sequence[FileFacts], label: FileFacts, grid: Grid | None, dimensions: int
) -> None:
    image = images[0] if images and images[0].decoded else None
    if image is not None and image.shape != label.shape and sorted(image.shape) == sorted(label.shape):
        # Before an axis of it is taken for channels
        moved = (
            _as_lies(Grid(label.shape, label.matrix), Grid(image.shape, image.matrix))
            if len(label.shape) == 3
            else None
        )
        if moved is None or moved.shape != image.shape:
            check_same_grid(path, Grid(label.shape, label.matrix), case.images[0], Grid(image.shape, image.matrix))
    spatial, found = split_shape(path, label.shape, dimensions)
    check_label_axes(path, label.shape, found)
    if grid is not None:
        check_same_grid(path, _as_lies(Grid(spatial, label.matrix), grid), case.images[0], grid)


def _as_lies(grid: Grid, reference: Grid) -> Grid:
    """The grid with its axes in the order and direction of another; the voxels are a view of one."""
    if np.array_equal(grid.affine, reference.affine):
        return grid
    return reoriented(np.broadcast_to(np.uint8(0), grid.shape), grid, reference)[1]


def without_declared(fault: str) -> str:
    """The sentence on undeclared label values, less the list of all 255 that reading without a recipe declares."""
    before, found, _ = fault.partition(_DECLARED)
    if not found:
        return fault
    return f"{before}; a recipe can declare the values 1 to 255, so write the label anew with such values"


def _warnings(case: Case, voxels: dict[int, int] | None, label: FileFacts | None, terms: Terms) -> list[str]:
    if voxels is None or label is None or label.values is None or label.resampled is None:
        return []
    left = class_voxels([(value, 1) for value in label.resampled], terms.data)
    spacing = "×".join(f"{one:g}" for one in terms.data.spacing or ())
    return [
        f"case {case.name}: class {terms.data.classes[value]} ({value}) has {count:,} voxel{'s' * (count != 1)} in {case.label}, "
        f"and none once it is resampled to data.spacing {spacing} mm; a finer data.spacing keeps it"
        for value, count in voxels.items()
        if value and count and not left[value]
    ]
