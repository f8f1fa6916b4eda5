"""Owns reading one case: image channels and label as arrays on one grid, with every policy on damaged or odd files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fasttrain.data.grids import ALIGNED_VOXELS, displacement, reoriented
from fasttrain.data.labels import class_indices
from fasttrain.data.nifti import NiftiFile, read_file
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import Case, Grid


def read_image(case: Case, data: DataSpec, dimensions: int) -> tuple[np.ndarray, Grid]:
    """Reads the image of a case.

    Returns float32 [channel, *spatial] in the file's own axes, C-contiguous, and its grid (with several files that of the
    first). Raises DataError for unreadable files, a wrong number of axes or channels, grids that differ, and NaN or
    infinite voxels (which `data.nan_policy: replace` fills with the channel's finite minimum).
    """
    channels = len(data.channels)
    if len(case.images) not in (1, channels):
        raise DataError(f"case {case.name} has {len(case.images)} image files, but data.channels names {channels}")
    if len(case.images) == 1:
        file = read_file(case.images[0])
        spatial, found = split_shape(case.images[0], file.header.shape, dimensions)
        check_channels(case.images[0], file.header.shape, found, data)
        stacked = np.moveaxis(file.values().reshape((*spatial, found), order="F"), -1, 0)
        image, grid = np.ascontiguousarray(stacked), Grid(spatial, file.header.affine)
    else:
        image, grid = _read_channel_files(case, dimensions)
    sources = case.images if len(case.images) == channels else case.images * channels
    faults = [
        fault
        for path, name, values in zip(sources, data.channels, image, strict=True)
        if (fault := _mend_non_finite(path, name, values, data))
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
    file = read_file(case.label)
    spatial, found = split_shape(case.label, file.header.shape, dimensions)
    if found != 1:
        raise DataError(f"{case.label} has the shape {_text(file.header.shape)}; a label holds one class value a voxel")
    grid = Grid(spatial, file.header.affine)
    values = class_indices(file, file.raw.reshape(spatial, order="F"), data)
    if image_grid is not None:
        values, grid = reoriented(values, grid, image_grid)
        check_same_grid(case.label, grid, case.images[0], image_grid)
        grid = image_grid
    return np.ascontiguousarray(values)[None], grid


def split_shape(path: Path, shape: tuple[int, ...], dimensions: int) -> tuple[tuple[int, ...], int]:
    """The spatial axes and the number of channels (stored last) of a stored shape; trailing axes of length 1 are dropped.

    Raises DataError where the axes fit no `dimensions`-D image.
    """
    if len(shape) < dimensions:
        raise DataError(
            f"{path} has the shape {_text(shape)}, {len(shape)} axes, but patch.size has {dimensions}; "
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
        same_sizes = sorted(grid.shape) == sorted(reference.shape)
        hint = "; the same sizes in another order, so one was saved with its axes swapped" if same_sizes else ""
        raise DataError(
            f"{path} has the shape {_text(grid.shape)}, but {reference_path} has {_text(reference.shape)}{hint or _REGRID}"
        )
    millimetres, voxels = displacement(grid, reference)
    if not voxels <= ALIGNED_VOXELS:
        raise DataError(
            f"{path} lies {millimetres:.4g} mm ({voxels:.3g} voxels) from {reference_path} at the farthest corner, but "
            f"{ALIGNED_VOXELS} voxels are allowed; resample one onto the other's grid, or copy the affine if it is wrong"
        )


_REGRID = "; resample one onto the other's grid"


def _read_channel_files(case: Case, dimensions: int) -> tuple[np.ndarray, Grid]:
    """Every channel file is read before anything is raised, so that all faults of the case show in one pass."""
    faults: list[str] = []
    channels: list[np.ndarray] = []
    grid: Grid | None = None
    for path in case.images:
        try:
            file = read_file(path)
            values, own = _one_channel(path, file, dimensions)
            if grid is None:
                grid = own
            else:
                values, own = reoriented(values, own, grid)
                check_same_grid(path, own, case.images[0], grid)
            channels.append(values)
        except DataError as error:
            faults.extend(error.faults)
    if faults or grid is None:
        raise DataError(faults)
    image = np.empty((len(channels), *grid.shape), dtype=np.float32)
    for index, values in enumerate(channels):
        image[index] = values
    return image, grid


def _one_channel(path: Path, file: NiftiFile, dimensions: int) -> tuple[np.ndarray, Grid]:
    spatial, found = split_shape(path, file.header.shape, dimensions)
    if found != 1:
        raise DataError(
            f"{path} has the shape {_text(file.header.shape)}, {found} channels; one a file is expected here"
        )
    return file.values().reshape(spatial, order="F"), Grid(spatial, file.header.affine)


def check_channels(path: Path, shape: tuple[int, ...], found: int, data: DataSpec) -> None:
    """Raises DataError where one file with all channels has another number of them than the recipe names."""
    expected = len(data.channels)
    if found != expected:
        raise DataError(
            f"{path} has the shape {_text(shape)}, {found} channel{'s' if found != 1 else ''}, but data.channels names "
            f"{expected} ({', '.join(data.channels)}); name as many channels as the file has"
        )


def _mend_non_finite(path: Path, channel: str, values: np.ndarray, data: DataSpec) -> str | None:
    """Fills `values` in place where the recipe allows it; otherwise the fault."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    nans = int(np.isnan(values).sum())
    infinite = int(values.size - finite.sum()) - nans
    if not finite.any():
        return f"{path} has no finite voxel in channel {channel}; leave the case out"
    if data.nan_policy == "refuse":
        return (
            f"{path} has {nans:,} NaN and {infinite:,} infinite voxels in channel {channel}; mend the file, or set "
            "data.nan_policy: replace to fill them with the channel's minimum"
        )
    values[~finite] = values[finite].min()
    return None


def _text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
