"""Owns the guess, from headers alone, of what the preprocessed cases will hold in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import nibabel as nib
import numpy as np

from fasttrain.data.centres import CENTRES_PER_CLASS, index_type
from fasttrain.data.grids import spacing_of
from fasttrain.data.nifti import read_header
from fasttrain.data.reading import check_channels, check_same_grid, split_shape
from fasttrain.errors import RecipeError
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case, Grid

_MOST_VOXELS = 2**36
_ITEM_BYTES = {"float32": 4, "float16": 2}


def estimate_bytes(cases: Sequence[Case], recipe: Recipe) -> int:
    """Bytes of all training samples of `cases`: image, label and centres, padded to the patch.

    An upper bound but for rounding: foreground crops are not known, and classes may have fewer centres. Reads the first
    bytes of each image and label; raises DataError for a header that cannot be read or shows that the case will be refused,
    RecipeError for a spacing that no memory could hold.
    """
    data = recipe.data
    lists = data.class_count - 1 + (recipe.patch.background_above is not None)
    voxel_bytes = len(data.channels) * _ITEM_BYTES[data.storage_dtype] + 1
    total = 0
    for case in cases:
        header = read_header(case.images[0])
        spatial, found = split_shape(case.images[0], header.shape, recipe.dimensions)
        if len(case.images) == 1:
            check_channels(case.images[0], header.shape, found, data)
        _check_label(case, spatial, recipe.dimensions)
        shape = _preprocessed_shape(recipe, spatial, header.affine)
        voxels = math.prod(max(int(length), size) for length, size in zip(shape, recipe.patch.size, strict=True))
        if voxels > _MOST_VOXELS:
            raise RecipeError(
                f"data.spacing {list(data.spacing or ())} makes {voxels:.3g} voxels of {case.images[0]}; its own spacing is "
                f"{[round(float(one), 6) for one in spacing_of(header.affine, recipe.dimensions)]}"
            )
        index_bytes = np.dtype(index_type(voxels)).itemsize
        total += voxels * voxel_bytes + index_bytes * lists * min(CENTRES_PER_CLASS, voxels)
    return total


def _check_label(case: Case, spatial: tuple[int, ...], dimensions: int) -> None:
    """What headers alone show: a label of other sizes than its image's, in whatever order of axes."""
    if case.label is None:
        return
    header = read_header(case.label)
    shape, _ = split_shape(case.label, header.shape, dimensions)
    if sorted(shape) != sorted(spatial):
        check_same_grid(case.label, Grid(shape, header.affine), case.images[0], Grid(spatial, header.affine))


def _preprocessed_shape(recipe: Recipe, spatial: tuple[int, ...], affine: np.ndarray) -> np.ndarray:
    shape, spacing = np.array(spatial), spacing_of(affine, recipe.dimensions)
    if recipe.data.orientation and recipe.dimensions == 3:
        order = _axis_order(affine, recipe.data.orientation)
        shape, spacing = shape[order], spacing[order]
    if recipe.data.spacing is None:
        return shape
    # In float64 throughout: a spacing of 1e-300 is refused by the number of voxels, not by a cast
    return np.minimum(np.rint((shape - 1) * spacing / np.array(recipe.data.spacing)) + 1, 1e15)


def _axis_order(affine: np.ndarray, axcodes: str) -> list[int]:
    """For each axis of the wanted orientation, the axis of the file that runs along it."""
    codes = nib.orientations.aff2axcodes(affine)
    opposite = dict(zip("RLAPSI", "LRPAIS", strict=True))
    return [next(axis for axis, code in enumerate(codes) if code in (one, opposite[one])) for one in axcodes]
