"""Owns the arithmetic of voxel grids: where their corners lie, how far two differ, and which index moves link them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fasttrain.samples import Grid

ALIGNED_VOXELS = 0.1
"""Corners of image and label may differ by this much; scanners' and tools' rounding stays far below."""
EXACT_VOXELS = 1e-3
"""Below this, two grids are the same lattice: header rounding, no resampling."""

_SLAB_VOXELS = 1 << 20


@dataclass(frozen=True)
class AxisMoves:
    """An exact link of two lattices: axis a of the one is axis `axes[a]` of the other.

    index_other[axes[a]] = −index[a] + offsets[a] where `flips[a]`, else index[a] + offsets[a].
    """

    axes: tuple[int, ...]
    flips: tuple[bool, ...]
    offsets: tuple[int, ...]


def with_third_axis(affine: np.ndarray) -> np.ndarray:
    """A copy whose third column is a unit normal where the file of a plane image left it empty or dependent."""
    completed = np.array(affine, dtype=np.float64)
    normal = np.cross(completed[:3, 0], completed[:3, 1])
    length = float(np.linalg.norm(normal))
    if length > 0 and abs(float(np.linalg.det(completed[:3, :3]))) < 1e-12 * length:
        completed[:3, 2] = normal / length
    return completed


def spacing_of(affine: np.ndarray, dimensions: int) -> np.ndarray:
    """The distance of neighbouring voxels along each axis in mm, [dimensions]."""
    return np.asarray(np.sqrt((np.asarray(affine)[:3, :dimensions] ** 2).sum(axis=0)))


def index_map(source: Grid, target: Grid) -> np.ndarray:
    """The 4×4 matrix from a voxel index of `source` to the index of the same place in `target`."""
    return np.linalg.solve(target.affine, source.affine)


def corners(grid: Grid) -> np.ndarray:
    """World places of the centres of the corner voxels in mm, [2^axes, 3]."""
    ends = product(*((0, length - 1) for length in grid.shape))
    index = np.array([(*corner, *(0,) * (3 - len(corner)), 1) for corner in ends], dtype=np.float64)
    return np.asarray((index @ grid.affine.T)[:, :3])


def displacement(grid: Grid, reference: Grid) -> tuple[float, float]:
    """The farthest any corner of `grid` lies from the same corner of `reference`: (mm, voxels of `reference`)."""
    shift = corners(grid) - corners(reference)
    voxels = np.linalg.solve(reference.affine[:3, :3], shift.T)
    return float(np.linalg.norm(shift, axis=1).max()), float(np.linalg.norm(voxels, axis=0).max())


def exact_moves(source: Grid, target: Grid) -> AxisMoves | None:
    """The index moves from `source` to `target`, None where the lattices differ by more than moves."""
    dimensions = len(source.shape)
    matrix = index_map(source, target)
    linear, offset = matrix[:dimensions, :dimensions], matrix[:dimensions, 3]
    rounded, whole = np.rint(linear), np.rint(offset)
    if not (np.abs(rounded).sum(axis=0) == 1).all() or not (np.abs(rounded).sum(axis=1) == 1).all():
        return None
    lengths = np.array(source.shape, dtype=np.float64)
    drift = np.abs(linear - rounded) @ lengths + np.abs(offset - whole)
    if drift.max() > EXACT_VOXELS:
        return None
    axes = tuple(int(axis) for axis in np.abs(rounded).argmax(axis=0))
    flips = tuple(bool(rounded[axis, column] < 0) for column, axis in enumerate(axes))
    return AxisMoves(axes, flips, tuple(int(whole[axis]) for axis in axes))


def reoriented(values: np.ndarray, grid: Grid, reference: Grid) -> tuple[np.ndarray, Grid]:
    """`values` [*spatial] with axes permuted and flipped to run as those of `reference`; only memory order changes."""
    dimensions = len(grid.shape)
    if np.array_equal(grid.affine[:3, :dimensions], reference.affine[:3, :dimensions]):
        return values, grid
    from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation

    matrix = np.eye(dimensions + 1)
    matrix[:dimensions, :dimensions] = index_map(grid, reference)[:dimensions, :dimensions]
    orientation = io_orientation(matrix)
    if np.isnan(orientation).any():
        return values, grid
    if (orientation == np.stack([np.arange(dimensions), np.ones(dimensions)], axis=1)).all():
        return values, grid
    moved = apply_orientation(values, orientation)
    step = inv_ornt_aff(orientation, grid.shape)
    return moved, Grid(moved.shape, grid.affine @ in_four(step))


def is_sheared(axes: np.ndarray, shape: Sequence[int]) -> bool:
    """Whether the axes of a grid, the columns of `axes` [world, axis], lean by a thousandth of a voxel over its length."""
    directions = axes / np.sqrt((axes**2).sum(axis=0))
    return bool(np.abs(directions.T @ directions - np.eye(len(shape))).max() * max(shape) > EXACT_VOXELS)


def slabs(shape: Sequence[int]) -> Iterator[slice]:
    """Runs of whole rows of the first axis, of some million voxels: what is computed for one at a time takes little memory."""
    step = max(1, _SLAB_VOXELS // max(math.prod(shape[1:]), 1))
    for first in range(0, shape[0], step):
        yield slice(first, first + step)


def in_four(matrix: np.ndarray) -> np.ndarray:
    """A 3×3 (plane) index matrix as 4×4 with an untouched third axis; a 4×4 one as it is."""
    if matrix.shape[0] == 4:
        return np.asarray(matrix, dtype=np.float64)
    wide = np.eye(4)
    wide[:2, :2], wide[:2, 3] = matrix[:2, :2], matrix[:2, 2]
    return wide
