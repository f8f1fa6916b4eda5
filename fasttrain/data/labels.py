"""Owns the step from a label file's stored values to class indices: rounding, the map, the declared set, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import IGNORED
from fasttrain.wording import counted

_WHOLE = 1e-3
_LISTED = 8


def class_indices(file: NiftiFile, values: np.ndarray, data: DataSpec) -> np.ndarray:
    """Class indices, uint8, of `values` (a view of `file.raw`, any shape), IGNORED where they are `data.ignore_label`.

    Values are rounded, then replaced by `data.label_map`, then looked up in the declared set. Raises DataError for NaN or
    infinite voxels, values that are not whole within rounding, and values that are not declared, each with its voxel count.
    """
    whole = _in_a_byte(whole_values(file, values))
    if whole.dtype == np.uint8:
        counts = np.bincount(whole.ravel(order="K"), minlength=256)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(whole, return_counts=True)
    if faults := faults_of_values(file.header.path, found, counts, data):
        raise DataError(faults)
    indices = _indices_of(found, data).astype(np.uint8)
    if whole.dtype == np.uint8:
        table = np.zeros(256, dtype=np.uint8)
        table[found] = indices
        return table[whole]
    return indices[np.searchsorted(found, whole)]


def faults_of_values(path: Path, found: np.ndarray, counts: np.ndarray, data: DataSpec) -> list[str]:
    """One sentence for each kind of fault in a table of whole label values, `counts` voxels of each; [] where there is none.

    `found` are the values of the file, before `data.label_map`, each once.
    """
    strange = _indices_of(found, data) == _UNDECLARED
    return [_undeclared(path, found, counts, strange, data)] if strange.any() else []


_UNDECLARED = -1


def _indices_of(found: np.ndarray, data: DataSpec) -> np.ndarray:
    """The class index of each value of the file; _UNDECLARED where there is none."""
    # Exact for all that can be declared, whatever the file's own type could not hold
    found = found.astype(np.float64)
    mapped = found.copy()
    for source, target in data.label_map.items():
        mapped[found == source] = target
    declared = np.array(data.class_values, dtype=np.float64)
    places = np.searchsorted(declared, mapped).clip(max=len(declared) - 1)
    indices = np.where(declared[places] == mapped, places, _UNDECLARED)
    if data.ignore_label is not None:
        indices[mapped == data.ignore_label] = IGNORED
    return indices


def _in_a_byte(whole: np.ndarray) -> np.ndarray:
    """Wider integers as uint8 where all of them fit, so that they are counted and looked up without sorting."""
    fits = whole.dtype != np.uint8 and whole.size and whole.min() >= 0 and whole.max() <= 255
    return whole.astype(np.uint8) if fits else whole


def whole_values(file: NiftiFile, values: np.ndarray) -> np.ndarray:
    """Whole numbers of any width. Stored integers under a scale factor land up to half a step beside the true value.

    Raises DataError for NaN or infinite voxels and for values that are not whole within rounding.
    """
    path = file.header.path
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


def _undeclared(path: Path, found: np.ndarray, counts: np.ndarray, strange: np.ndarray, data: DataSpec) -> str:
    values, voxels = found[strange], counts[strange]
    listed = [
        f"{value:.15g} in {counted(int(count), 'voxel')}"
        for value, count in zip(values[:_LISTED], voxels, strict=False)
    ]
    if len(values) > _LISTED:
        listed.append(counted(len(values) - _LISTED, "more value"))
    declared = ", ".join(f"{value} {data.classes.get(value, 'background')}" for value in data.class_values)
    if data.ignore_label is not None:
        declared += f", {data.ignore_label} to be ignored"
    return (
        f"{path} has the undeclared label value{'s' if len(values) > 1 else ''} {', '.join(listed)}; declared are "
        f"{declared}: {_remedies(found, strange, data)}"
    )


def _remedies(found: np.ndarray, strange: np.ndarray, data: DataSpec) -> str:
    values = found[strange]
    several = len(values) > 1
    value = int(values[0])
    remedies = []
    if len(data.classes) == 1 and not several and not set(data.classes) & set(found.tolist()):
        # A mask of 0 and 255, say: in this label nothing else can be the one class
        only, name = next(iter(data.classes.items()))
        remedies.append(f"set data.label_map: {{{value}: {only}}} if it is {name}")
    else:
        if several or 1 <= value <= 255:
            remedies.append(f"add {'what is missing' if several else 'it'} to data.classes")
        remedies.append(f"map {'them to declared values' if several else 'it to a declared value'} with data.label_map")
    if data.ignore_label is None:
        ignoring = "leave the voxels of one of them out with data.ignore_label"
        remedies.append(ignoring if several else f"set data.ignore_label: {value} if its voxels are to be left out")
    return ", ".join([*remedies, "or mend the label"])
