"""Owns the step from a label file's stored values to class indices: rounding, the map, the declared set, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fasttrain.data.grids import slabs
from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.spec import MOST
from fasttrain.samples import IGNORED
from fasttrain.wording import counted

_WHOLE = 1e-3
_LISTED = 8
_PIECE_VOXELS = 1 << 20


def class_indices(file: NiftiFile, values: np.ndarray, data: DataSpec) -> np.ndarray:
    """Class indices, uint8, of `values` (a view of `file.raw`, any shape), IGNORED where they are `data.ignore_label`.

    Values are rounded, then replaced by `data.label_map`, then looked up in the declared set. Raises DataError for NaN or
    infinite voxels, values that are not whole within rounding, and values that are not declared, each with its voxel count.
    """
    whole = _in_a_byte(whole_values(file, values))
    if whole.dtype == np.uint8:
        counts = _counts_of_bytes(whole.ravel(order="K"))
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


def _counts_of_bytes(flat: np.ndarray) -> np.ndarray:
    """In pieces, since bincount makes 64-bit integers of all that it is given."""
    counts = np.zeros(256, dtype=np.int64)
    for first in range(0, flat.size, _PIECE_VOXELS):
        counts += np.bincount(flat[first : first + _PIECE_VOXELS], minlength=256)
    return counts


def _in_a_byte(whole: np.ndarray) -> np.ndarray:
    """Whole numbers as uint8 where all of them fit, so that they are counted and looked up without sorting."""
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
    bound = _WHOLE
    if integers and file.scaled and file.slope != 1.0:
        # The half step itself occurs (1 stored as 127 × 2/255), and float32 in the header blurs it.
        bound = max(abs(file.slope) / 2 * 1.001, _WHOLE)
    infinite, off = 0, np.empty(0)
    count_off, parts = 0, []
    # In slabs of the file's own order, since float64 of a whole label takes many times its memory
    for rows in slabs(values.T.shape):
        scaled = values.T[rows].astype(np.float64)
        if file.scaled:
            scaled = scaled * file.slope + file.intercept
        finite = np.isfinite(scaled)
        infinite += int(finite.size - finite.sum())
        rounded = np.rint(scaled)
        with np.errstate(invalid="ignore"):
            found = scaled[np.abs(scaled - rounded) > bound]
        off, count_off = off if off.size else found[:1], count_off + found.size
        parts.append(_in_a_byte(rounded))
    if infinite:
        raise DataError(
            f"{path} has {infinite:,} NaN or infinite voxels in a label; class values are whole numbers, "
            "so write the label anew"
        )
    if count_off:
        raise DataError(
            f"{path} has {count_off:,} label voxels that are no whole numbers, such as {off[0]:.6g}; "
            "labels must be class values (not probabilities or linearly resampled), so write the label anew"
        )
    return np.concatenate(parts).T


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
    # As Python's own numbers: the least of 64-bit ones has no absolute value, and unsigned ones are not below 0
    if any(abs(int(one)) > MOST for one in values.tolist()):
        return f"a recipe can name values from -{MOST:,} to {MOST:,}, so mend the label"
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
