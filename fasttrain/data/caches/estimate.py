"""Owns the guess, from headers alone, of what the preprocessed cases will hold in memory."""

from __future__ import annotations

from collections.abc import Sequence

import nibabel as nib
import numpy as np

from fasttrain.data.centres import CENTRES_PER_CLASS
from fasttrain.data.grids import spacing_of
from fasttrain.data.nifti import read_header
from fasttrain.data.reading import split_shape
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case

_ITEM_BYTES = {"float32": 4, "float16": 2}


def estimate_bytes(cases: Sequence[Case], recipe: Recipe) -> int:
    """Bytes of all training samples of `cases`: image, label and centres, padded to the patch.

    An upper bound but for rounding: foreground crops are not known, and classes may have fewer centres. Reads the first
    bytes of each image; raises DataError for one that has no readable header.
    """
    data = recipe.data
    lists = data.class_count - 1 + (recipe.patch.background_above is not None)
    voxel_bytes = len(data.channels) * _ITEM_BYTES[data.storage_dtype] + 1
    total = 0
    for case in cases:
        header = read_header(case.images[0])
        spatial, _ = split_shape(case.images[0], header.shape, recipe.dimensions)
        shape = _preprocessed_shape(recipe, spatial, header.affine)
        voxels = int(np.prod(np.maximum(shape, recipe.patch.size), dtype=np.int64))
        total += voxels * voxel_bytes + 4 * lists * min(CENTRES_PER_CLASS, voxels)
    return total


def _preprocessed_shape(recipe: Recipe, spatial: tuple[int, ...], affine: np.ndarray) -> np.ndarray:
    shape, spacing = np.array(spatial), spacing_of(affine, recipe.dimensions)
    if recipe.data.orientation and recipe.dimensions == 3:
        order = _axis_order(affine, recipe.data.orientation)
        shape, spacing = shape[order], spacing[order]
    if recipe.data.spacing is None:
        return shape
    return np.rint((shape - 1) * spacing / np.array(recipe.data.spacing)).astype(np.int64) + 1


def _axis_order(affine: np.ndarray, axcodes: str) -> list[int]:
    """For each axis of the wanted orientation, the axis of the file that runs along it."""
    codes = nib.orientations.aff2axcodes(affine)
    opposite = dict(zip("RLAPSI", "LRPAIS", strict=True))
    return [next(axis for axis, code in enumerate(codes) if code in (one, opposite[one])) for one in axcodes]
