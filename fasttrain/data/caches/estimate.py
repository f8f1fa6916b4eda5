"""Owns the guess, from headers alone, of what the preprocessed cases will hold in memory, and what making one takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fasttrain.data.grids import is_sheared
from fasttrain.data.openkbp import GRID, affine_of, read_spacing
from fasttrain.data.reading import check_channels, check_same_grid, split_shape
from fasttrain.data.volume_files import read_header
from fasttrain.data.volumes import ITEM_BYTES, preprocessed_shape, sample_bytes
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case, Grid

_MARGIN = 1.2
_DOSE_VOXEL_BYTES = 40
"""Of a patient that is read: CT and dose as they are unpacked, as float32 and once more together, and the structures."""
_SLABS_BYTES, _SLAB_VOXEL_BYTES = 64 << 20, 64
"""What steps that go slab by slab (`grids.slabs`) hold beside the volume, and of one smaller than a slab."""


def estimate_bytes(cases: Sequence[Case], recipe: Recipe) -> int:
    """Bytes of all training samples of `cases`: image, label and centres, padded to the patch.

    An upper bound but for rounding: foreground crops are not known, and classes may have fewer centres. Reads the first
    bytes of each image and label; raises DataError for a header that cannot be read or shows that the case will be refused.
    Cases that resampling makes too large for any memory were refused by the check (`checking.sizes`).
    """
    data = recipe.data
    lists = recipe.centre_lists + (recipe.patch.background_above is not None)
    total = 0
    for case in cases:
        if recipe.task == "dose":
            shape, kept = _wanted(recipe, *dose_grid(case)), recipe.task_facts.label_bytes
            sizes = (recipe.stored_channels, lists, recipe.box, ITEM_BYTES[data.storage_dtype], kept)
            total += sample_bytes(shape, *sizes)
            continue
        header = read_header(case.images[0])
        spatial, found = split_shape(case.images[0], header.shape, recipe.volume_dimensions)
        if len(case.images) == 1:
            check_channels(case.images[0], header.shape, found, data)
        _check_label(case, spatial, recipe.volume_dimensions)
        shape = _wanted(recipe, spatial, header.affine)
        total += sample_bytes(shape, len(data.channels), lists, recipe.box, ITEM_BYTES[data.storage_dtype])
    return total


def estimate_shapes(cases: Sequence[Case], recipe: Recipe) -> list[tuple[int, ...]]:
    """The shapes of the preprocessed cases, but for foreground crops; reads and raises what `estimate_bytes` does."""
    shapes = []
    for case in cases:
        if recipe.task == "dose":
            shapes.append(_wanted(recipe, *dose_grid(case)))
            continue
        header = read_header(case.images[0])
        spatial, _ = split_shape(case.images[0], header.shape, recipe.volume_dimensions)
        shapes.append(_wanted(recipe, spatial, header.affine))
    return shapes


def dose_grid(case: Case) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and affine of a patient, of whose files one small one is read."""
    return GRID, affine_of(read_spacing(case))


def build_bytes(cases: Sequence[Case], recipe: Recipe) -> int:
    """Memory that making the volume of the largest of `cases` takes at its worst, the volume itself included.

    The most that one of the steps of `Preprocess` holds at once, as measured (within 20%, which are added). Reads the first bytes
    of each image and label, as `estimate_bytes` does, which is to be asked first.
    """
    return max((_build_bytes(case, recipe) for case in cases), default=0)


def _build_bytes(case: Case, recipe: Recipe) -> int:
    if recipe.task == "dose":
        read, made = math.prod(GRID), math.prod(_wanted(recipe, *dose_grid(case)))
        padded = max(made, math.prod(recipe.box))
        return int((_DOSE_VOXEL_BYTES * read + 24 * padded) * _MARGIN)
    channels = len(recipe.data.channels)
    header = read_header(case.images[0])
    spatial, _ = split_shape(case.images[0], header.shape, recipe.volume_dimensions)
    read, wanted = math.prod(spatial), _wanted(recipe, spatial, header.affine)
    made = math.prod(wanted)
    padded = math.prod(max(pair) for pair in zip(wanted, recipe.box, strict=True))
    image, stored = 4 * channels * read, math.prod(header.shape) * header.dtype.itemsize
    label = (
        0
        if case.label is None
        else read * (read_header(case.label, case.drawn).dtype.itemsize + 3) + _packed_bytes(case.label)
    )
    resampled = wanted != _shape(recipe, spatial, header.affine, None)
    steps = (
        image + stored + _packed_bytes(case.images[0]),
        image + label,
        2 * image + 2 * read,
        image + read + _resampling_bytes(header.affine[:3, : len(spatial)], spatial, made, channels)
        if resampled
        else 0,
        padded * (8 * channels + 2),
    )
    return int(max(steps) * _MARGIN) + min(_SLABS_BYTES, _SLAB_VOXEL_BYTES * max(read, padded))


def _resampling_bytes(axes: np.ndarray, spatial: tuple[int, ...], made: int, channels: int) -> int:
    if is_sheared(axes, spatial):
        # MONAI's grid of coordinates in two layouts, the image after, and once more in the order that torch asks for
        return made * (24 + 12 * channels)
    # The image after, and the label while it goes from one axis to the next
    return made * (4 * channels + 3)


def _packed_bytes(path: Path) -> int:
    """Of a compressed file, which is in memory together with what it unpacks to."""
    return path.stat().st_size if path.name.lower().endswith(".gz") else 0


def _check_label(case: Case, spatial: tuple[int, ...], dimensions: int) -> None:
    """What headers alone show: a label of other sizes than its image's, in whatever order of axes."""
    if case.label is None:
        return
    header = read_header(case.label, case.drawn)
    shape, _ = split_shape(case.label, header.shape, dimensions)
    if sorted(shape) != sorted(spatial):
        check_same_grid(case.label, Grid(shape, header.affine), case.images[0], Grid(spatial, header.affine))


def _wanted(recipe: Recipe, spatial: tuple[int, ...], affine: np.ndarray) -> tuple[int, ...]:
    return _shape(recipe, spatial, affine, recipe.data.spacing)


def _shape(
    recipe: Recipe, spatial: tuple[int, ...], affine: np.ndarray, spacing: Sequence[float] | None
) -> tuple[int, ...]:
    return preprocessed_shape(spatial, affine, spacing, recipe.data.orientation, recipe.data.sliced_across)
