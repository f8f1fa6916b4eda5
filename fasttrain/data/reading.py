"""Owns reading one case: image channels and label as arrays on one grid, with every policy on damaged or odd files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.grids import ALIGNED_VOXELS, displacement, reoriented
from fasttrain.data.labels import class_indices
from fasttrain.data.nifti import NiftiFile
from fasttrain.data.volume_files import read_file
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import Case, Grid
from fasttrain.wording import counted


def read_image(case: Case, data: DataSpec, dimensions: int) -> tuple[np.ndarray, Grid]:
    """Reads the image of a case.

    Returns float32 [channel, *spatial] in the file's own axes, C-contiguous, and its grid (with several files that of the
    first). Raises DataError for unreadable files, a wrong number of axes or channels, grids that differ, and NaN or
    infinite voxels (which `data.nan_policy: replace` fills with the channel's finite minimum).
    """
    check_file_count(case, data)
    if len(case.images) == 1:
        file = read_file(case.images[0])
        spatial, found = split_shape(case.images[0], file.header.shape, dimensions)
        check_channels(case.images[0], file.header.shape, found, data)
        image, grid = np.empty((found, *spatial), dtype=np.float32), Grid(spatial, file.header.affine)
        dtypes = [file.header.dtype] * found
        for values, stored in zip(image, np.moveaxis(_view(file, (*spatial, found)), -1, 0), strict=True):
            _fill(values, stored, file)
    else:
        image, grid, dtypes = _read_channel_files(case, dimensions)
    sources = case.images if len(case.images) == len(data.channels) else case.images * len(data.channels)
    faults = [
        fault
        for path, name, values, dtype in zip(sources, data.channels, image, dtypes, strict=True)
        if (fault := _mend_values(path, name, values, dtype, data))
    ]
    if faults:
        raise DataError(faults)
    return image, grid


def read_label(case: Case, data: DataSpec, dimensions: int, image_grid: Grid | None) -> tuple[np.ndarray, Grid]:
    """Reads the label of a case onto the grid of its image.

    Returns uint8 [1, *spatial] of class indices, C-contiguous, and `image_grid` (the file's own grid, unchecked, where that
    is None since the image could not be read). A label stored with other axis directions
    is reoriented by its own affine; corners may then differ by 0.1 voxel. Raises DataError for anything farther off, other
    shapes, and the faults of `labels.class_indices`.
    """
    if case.label is None:
        raise DataError(f"case {case.name} has no label file")
    file = read_file(case.label, case.drawn)
    stored = file.header.shape
    if image_grid is not None:
        _check_order_of_axes(case.label, stored, case.images[0], image_grid.shape)
    spatial, found = split_shape(case.label, stored, dimensions)
    if found != 1:
        classes = data.class_count
        check_label_axes(case.label, stored, found, found in (classes - 1, classes) or is_one_hot(file.raw))
    grid = Grid(spatial, file.header.affine)
    values = class_indices(file, _view(file, spatial), data)
    if image_grid is not None:
        values, grid = reoriented(values, grid, image_grid)
        check_same_grid(case.label, grid, case.images[0], image_grid)
        grid = image_grid
    label = np.empty((1, *grid.shape), dtype=np.uint8)
    _fill(label[0], values)
    return label, grid


def is_one_hot(raw: np.ndarray) -> bool:
    """Whether the stored values are 0 and 1 alone, with exactly one 1 along the last axis longer than 1."""
    values = raw.reshape([length for length in raw.shape if length != 1] or [1], order="F")
    if float(values.min()) != 0.0 or float(values.max()) != 1.0:
        return False
    return bool(((values == 0) | (values == 1)).all() and (np.count_nonzero(values, axis=-1) == 1).all())


def _check_order_of_axes(path: Path, shape: tuple[int, ...], image_path: Path, image_shape: tuple[int, ...]) -> None:
    """A label saved as 1×434×636 for a slice of 434×636 would else be taken for one with 636 values a voxel."""
    ours, theirs = (sorted(length for length in one if length != 1) for one in (shape, image_shape))
    if ours == theirs and any(length != 1 for length in shape[len(image_shape) :]):
        raise DataError(_other_shape(path, shape, image_path, image_shape))


def split_shape(path: Path, shape: tuple[int, ...], dimensions: int) -> tuple[tuple[int, ...], int]:
    """The spatial axes and the number of channels (stored last) of a stored shape; trailing axes of length 1 are dropped.

    Raises DataError where the axes fit no `dimensions`-D image.
    """
    if len(shape) < dimensions:
        raise DataError(
            f"{path} has the shape {_text(shape)}, {counted(len(shape), 'axis', 'axes')}, but patch.size has {dimensions}; "
            f"give patch.size {len(shape)} values or use volumes"
        )
    extra = [length for length in shape[dimensions:] if length != 1]
    if len(extra) > 1:
        raise DataError(
            f"{path} has the shape {_text(shape)}; {dimensions} spatial axes and channels last are expected"
        )
    return shape[:dimensions], extra[0] if extra else 1


def check_same_grid(path: Path, grid: Grid, reference_path: Path, reference: Grid) -> None:
    """Raises DataError where two grids differ in shape, or by more than 0.1 voxel at a corner."""
    if grid.shape != reference.shape:
        raise DataError(_other_shape(path, grid.shape, reference_path, reference.shape))
    millimetres, voxels = displacement(grid, reference)
    if not voxels <= ALIGNED_VOXELS:
        raise DataError(
            f"{path} lies {millimetres:.4g} mm ({voxels:.3g} voxels) from {reference_path} at the farthest corner, but "
            f"{ALIGNED_VOXELS} voxels are allowed; resample one onto the other's grid, or copy the affine if it is wrong"
        )


def _other_shape(path: Path, shape: tuple[int, ...], reference_path: Path, reference: tuple[int, ...]) -> str:
    ours, theirs = (sorted(length for length in one if length != 1) for one in (shape, reference))
    hint = "the same sizes in another order, so one was saved with its axes swapped" if ours == theirs else _REGRID
    return f"{path} has the shape {_text(shape)}, but {reference_path} has {_text(reference)}; {hint}"


_IN_CACHE = 1 << 19
FLOAT16_LIMIT = 65504.0
"""The largest value that float16 holds."""
WHOLE_IN_FLOAT32 = 2.0**24
"""Up to here float32 holds every whole number."""
_FEWEST_STEPS = 256
_REGRID = "resample one onto the other's grid"


def _read_channel_files(case: Case, dimensions: int) -> tuple[np.ndarray, Grid, list[np.dtype[Any]]]:
    """Every channel file is read before anything is raised, so that all faults of the case show in one pass."""
    faults: list[str] = []
    dtypes: list[np.dtype[Any]] = []
    image: np.ndarray | None = None
    grid: Grid | None = None
    for index, path in enumerate(case.images):
        try:
            file = read_file(path)
            stored, own = _one_channel(path, file, dimensions)
            if grid is None or image is None:
                grid, image = own, np.empty((len(case.images), *own.shape), dtype=np.float32)
            else:
                stored, own = reoriented(stored, own, grid)
                check_same_grid(path, own, case.images[0], grid)
            _fill(image[index], stored, file)
            dtypes.append(file.header.dtype)
        except DataError as error:
            faults.extend(error.faults)
    if faults or grid is None or image is None:
        raise DataError(faults)
    return image, grid, dtypes


def _one_channel(path: Path, file: NiftiFile, dimensions: int) -> tuple[np.ndarray, Grid]:
    spatial, found = split_shape(path, file.header.shape, dimensions)
    check_one_channel(path, file.header.shape, found)
    return _view(file, spatial), Grid(spatial, file.header.affine)


def _view(file: NiftiFile, shape: tuple[int, ...]) -> np.ndarray:
    return file.raw.reshape(shape, order="F")


def _fill(target: np.ndarray, stored: np.ndarray, file: NiftiFile | None = None) -> None:
    """Copies the values (scaled as `file` says) from the order of the file to that of the target.

    A large volume goes row by row of the second axis: one sweep through a transposed volume misses the processor's cache at every
    voxel, which took three times as long for a CT of 512×512×100.
    """
    rows = [slice(row, row + 1) for row in range(stored.shape[1])] if stored.nbytes > _IN_CACHE else [slice(None)]
    for row in rows:
        part = stored[:, row]
        target[:, row] = part if file is None else file.scaled_values(part)


def check_file_count(case: Case, data: DataSpec) -> None:
    """Raises DataError where a case has neither one image file nor one a channel."""
    if len(case.images) not in (1, len(data.channels)):
        raise DataError(
            f"case {case.name} has {len(case.images)} image files, but data.channels names {len(data.channels)}"
        )


def check_one_channel(path: Path, shape: tuple[int, ...], found: int) -> None:
    """Raises DataError where the file of one channel holds several."""
    if found != 1:
        raise DataError(f"{path} has the shape {_text(shape)}, {found} channels; one a file is expected here")


def check_label_axes(path: Path, shape: tuple[int, ...], found: int, one_hot: bool = True) -> None:
    """Raises DataError where a label has a further axis, as one-hot labels have."""
    if found == 1:
        return
    if one_hot:
        raise DataError(
            f"{path} has the shape {_text(shape)}, which looks like a one-hot label of {found} classes; a label holds one "
            "class value a voxel, so write the index of the class (argmax over the last axis)"
        )
    raise DataError(
        f"{path} has the shape {_text(shape)}, {found} values a voxel; a label holds one class value a voxel, so write it so"
    )


def check_channels(path: Path, shape: tuple[int, ...], found: int, data: DataSpec) -> None:
    """Raises DataError where one file with all channels has another number of them than the recipe names."""
    expected = len(data.channels)
    if found == expected:
        return
    remedy = "name as many channels as the file has"
    if len(shape) == 3 and 1 in shape[:2]:
        axis = shape.index(1)
        remedy = (
            f"it is one slice whose axis of length 1 comes {'first' if axis == 0 else 'second'}, so write it as "
            f"{_text((*shape[:axis], *shape[axis + 1 :], 1))}"
        )
    elif len(shape) == 3 and found > 1:
        remedy += ", or if it is a volume give patch.size three values or cut it with data.slices"
    elif len(shape) > 3 and shape[0] == expected:
        remedy = "channels are stored last, and here they seem to come first, so move that axis to the end"
    raise DataError(
        f"{path} has the shape {_text(shape)}, {found} channel{'s' if found != 1 else ''}, but data.channels names "
        f"{expected} ({', '.join(data.channels)}); {remedy}"
    )


def coarse_fault(path: Path, channel: str, dtype: np.dtype[Any], minimum: float, maximum: float) -> str | None:
    """The sentence on a channel whose values lie so far from zero that float32 keeps fewer than 256 steps of their range.

    Integers beyond 2²⁴ are no fault by themselves: they are rounded by less than one part in ten million.
    """
    peak = max(abs(minimum), abs(maximum))
    if dtype.newbyteorder("=") == np.float32 or dtype.itemsize <= 2 or peak < WHOLE_IN_FLOAT32 or minimum == maximum:
        return None
    step = float(np.spacing(np.float32(peak)))
    if maximum - minimum >= _FEWEST_STEPS * step:
        return None
    return (
        f"{path} has values from {minimum:.9g} to {maximum:.9g} in channel {channel}, of which float32 keeps steps of {step:g} "
        "alone; subtract an offset and write the file anew"
    )


def _mend_values(path: Path, channel: str, values: np.ndarray, dtype: np.dtype[Any], data: DataSpec) -> str | None:
    """Fills what is not finite in place where the recipe allows it; otherwise the fault."""
    # NaN and infinity show in the extremes, so that a sound volume needs no mask
    minimum, maximum = float(values.min()), float(values.max())
    if np.isfinite(minimum) and np.isfinite(maximum):
        return coarse_fault(path, channel, dtype, minimum, maximum)
    finite = np.isfinite(values)
    nans = int(np.isnan(values).sum())
    infinite = int(values.size - finite.sum()) - nans
    fault = non_finite_fault(path, channel, nans, infinite, values.size, data)
    if fault is not None:
        return fault
    values[~finite] = values[finite].min()
    return coarse_fault(path, channel, dtype, float(values.min()), float(values.max()))


def non_finite_fault(path: Path, channel: str, nans: int, infinite: int, voxels: int, data: DataSpec) -> str | None:
    """The sentence on a channel with that many NaN and infinite of all its voxels; None where they may be filled."""
    if not nans + infinite:
        return None
    if nans + infinite == voxels:
        return f"{path} has no finite voxel in channel {channel}; leave the case out"
    if data.nan_policy == "refuse":
        return (
            f"{path} has {nans:,} NaN and {infinite:,} infinite voxels in channel {channel}; mend the file, or set "
            "data.nan_policy: replace to fill them with the channel's minimum"
        )
    return None


def _text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
