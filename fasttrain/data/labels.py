"""Owns the step from a label file's stored values to class indices: rounding, the declared set, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec

_WHOLE = 1e-3
_LISTED = 8


def class_indices(file: NiftiFile, values: np.ndarray, data: DataSpec) -> np.ndarray:
    """Class indices, uint8, of `values` (a view of `file.raw`, any shape).

    Raises DataError for NaN or infinite voxels, values that are not whole within rounding, and values outside 0 and
    `data.classes`, each with its voxel count.
    """
    path = file.header.path
    whole = _whole_values(path, file, values)
    declared = np.array(data.class_values)
    if whole.dtype == np.uint8:
        counts = np.bincount(whole.ravel(order="K"), minlength=256)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(whole, return_counts=True)
    strange = ~np.isin(found, declared)
    if strange.any():
        raise DataError(_undeclared(path, found[strange], counts[strange], data))
    table = np.zeros(256, dtype=np.uint8)
    table[declared] = np.arange(len(declared), dtype=np.uint8)
    return table[whole.astype(np.uint8, copy=False)]


def _whole_values(path: Path, file: NiftiFile, values: np.ndarray) -> np.ndarray:
    """Integers of any width. Stored integers under a scale factor land up to half a step beside the true value."""
    integers = values.dtype.kind in "iu"
    if integers and not file.scaled:
        return values
    scaled = values.astype(np.float64)
    bound = _WHOLE
    if file.scaled:
        scaled = scaled * file.slope + file.intercept
        if integers and file.slope != 1.0:
            # The half step itself occurs (1 stored as 127 × 2/255), and float32 in the header blurs it.
            bound = max(abs(file.slope) / 2 * 1.001, _WHOLE)
    finite = np.isfinite(scaled)
    if not finite.all():
        raise DataError(
            f"{path} has {int((~finite).sum()):,} NaN or infinite voxels in a label; class values are whole numbers, "
            "so write the label anew"
        )
    rounded = np.rint(scaled)
    off = np.abs(scaled - rounded) > bound
    if off.any():
        raise DataError(
            f"{path} has {int(off.sum()):,} label voxels that are no whole numbers, such as {scaled[off].flat[0]:.6g}; "
            "labels must be class values (not probabilities or linearly resampled), so write the label anew"
        )
    if rounded.min() >= 0 and rounded.max() <= 255:
        return rounded.astype(np.uint8)
    return rounded


def _undeclared(path: Path, found: np.ndarray, counts: np.ndarray, data: DataSpec) -> str:
    listed = [f"{value:.15g} in {count:,} voxels" for value, count in zip(found, counts, strict=True)]
    if len(listed) > _LISTED:
        listed = [*listed[:_LISTED], f"{len(listed) - _LISTED} more values"]
    declared = ", ".join(f"{value} {data.classes.get(value, 'background')}" for value in data.class_values)
    return (
        f"{path} has the undeclared label value{'s' if len(found) > 1 else ''} {', '.join(listed)}; declared are "
        f"{declared}: add what is missing to data.classes, or mend the label"
    )
