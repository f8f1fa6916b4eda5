"""Owns the arithmetic of what preprocessing makes of a grid: its shape and bytes, and the voxels that resampling picks.

Needs no torch: the check, which is to answer in a second, reckons with it as preprocessing does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fasttrain.data.grids import spacing_of

SAME_SPACING_MM = 1e-3
"""Spacings nearer to what is wanted are not resampled."""
MOST_VOXELS = 2**36
"""Of one preprocessed volume; no memory holds more."""
_MOST = 10**9
_LETTERS = ("LR", "PA", "IS")
"""Of each axis of RAS, the one against it first."""
_PLANES = ("sagittal", "coronal", "axial")
"""Slices across each axis of RAS."""
CENTRES_PER_CLASS = 10_000
"""More would not change the spread of crops, but would outweigh small volumes in memory."""
ITEM_BYTES = {"float32": 4, "float16": 2}
"""Of a voxel and channel, by `data.storage_dtype`."""
_SMALL_VOXELS = 1 << 16


def index_type(voxels: int) -> type[np.uint16] | type[np.int32]:
    """The type of the indices into a volume of so many voxels."""
    return np.uint16 if voxels <= _SMALL_VOXELS else np.int32


def sample_bytes(
    shape: Sequence[int], channels: int, lists: int, patch: Sequence[int] | None, item_bytes: int, label_bytes: int = 1
) -> int:
    """Bytes of one kept volume of that preprocessed shape: image and label in items of so many bytes, and `lists` lists of
    centres; padded to `patch`.
    """
    voxels = math.prod(max(pair) for pair in zip(shape, patch or shape, strict=True))
    index_bytes = np.dtype(index_type(voxels)).itemsize
    return voxels * (channels * item_bytes + label_bytes) + index_bytes * lists * min(CENTRES_PER_CLASS, voxels)


def preprocessed_shape(
    shape: tuple[int, ...],
    affine: np.ndarray,
    spacing: Sequence[float] | None,
    orientation: str | None,
    slices: str | int | None = None,
) -> tuple[int, ...]:
    """The shape [*spatial] of a volume after orientation and resampling, before any crop or padding.

    slices: the axis across which it is cut (`data.slices.axis`), which then comes first.
    """
    order, _ = axes_along(affine, len(shape), orientation)
    picks = _picked(shape, affine, spacing, orientation)
    lengths = [picks[axis][1] for axis in range(len(shape))] if picks else list(shape)
    if slices is not None:
        order = [order[axis] for axis in slices_first(affine[:, [*order, 3]], slices)]
    return tuple(lengths[axis] for axis in order)


def slices_first(affine: np.ndarray, across: str | int) -> list[int]:
    """The order of a volume's axes in which its slices across an axis lie behind one another.

    across: `sagittal`, `coronal` or `axial`, the axis nearest to the patient's, or its number. Where the axes run along none of
    the patient's, they are taken to be R, A and S.
    """
    first = across
    if isinstance(first, str):
        own, wanted = directions(affine), _PLANES.index(first)
        first = wanted if own is None else [int(end) for end in own[:, 0]].index(wanted)
    return [first, *(axis for axis in range(3) if axis != first)]


def picked_indices(
    shape: tuple[int, ...], affine: np.ndarray, spacing: Sequence[float] | None, orientation: str | None
) -> list[np.ndarray] | None:
    """Along each axis of the file the indices that nearest resampling to `spacing` takes, each once; None where all are taken.

    Voxel i of the new grid lies at i × new ÷ old spacing, counted from the end where the oriented volume begins.
    """
    picks = _picked(shape, affine, spacing, orientation)
    if picks is None or all(step <= 1 for step, _, _ in picks):
        return None
    indices = []
    for length, (step, count, flipped) in zip(shape, picks, strict=True):
        taken = np.arange(length)
        if step > 1:
            taken = np.minimum(np.rint(np.arange(count) * step), length - 1).astype(np.int64)
        indices.append(length - 1 - taken if flipped else taken)
    return indices


def _picked(
    shape: tuple[int, ...], affine: np.ndarray, spacing: Sequence[float] | None, orientation: str | None
) -> list[tuple[float, int, bool]] | None:
    """(step in voxels, number of new voxels, whether from the other end) along each axis of the file."""
    if spacing is None or len(spacing) != len(shape):
        return None
    own = spacing_of(affine, len(shape))
    order, flips = axes_along(affine, len(shape), orientation)
    wanted = np.empty(len(shape))
    wanted[order] = spacing
    if np.abs(own - wanted).max() < SAME_SPACING_MM:
        return None
    steps = wanted / own
    counts = [voxels_along(length, step) for length, step in zip(shape, steps, strict=True)]
    return [(float(step), count, flip) for step, count, flip in zip(steps, counts, flips, strict=True)]


def voxels_along(length: int, step: float) -> int:
    """How many voxels `step` old ones apart an axis of so many has; of two as near, the even number, as with MONAI."""
    return int(min(np.rint((length - 1) / step + 1), _MOST))


def axes_along(affine: np.ndarray, dimensions: int, orientation: str | None) -> tuple[list[int], list[bool]]:
    """For each axis of the wanted orientation the axis of the file along it, and which axes of the file run against it."""
    if orientation is None or dimensions != 3:
        return list(range(dimensions)), [False] * dimensions
    own = directions(affine)
    if own is None:
        return list(range(dimensions)), [False] * dimensions
    ends = [int(end) for end in own[:, 0]]
    order = [ends.index(next(axis for axis, pair in enumerate(_LETTERS) if letter in pair)) for letter in orientation]
    return order, [letter not in orientation for letter in letters(own)]


def letters(ends: np.ndarray) -> str:
    """`LPS`: where the axes of a file lead whose `directions` are these."""
    return "".join(_LETTERS[int(axis)][int(sign > 0)] for axis, sign in ends)


def directions(affine: np.ndarray) -> np.ndarray | None:
    """nibabel's orientation [axis of the file, (axis of RAS, ±1)] of a volume; None where an axis runs along none of them."""
    ends = _ends(np.ascontiguousarray(affine[:3, :3], dtype=np.float64).tobytes())
    return None if np.isnan(ends).any() else ends


@lru_cache(maxsize=4096)
def _ends(linear: bytes) -> np.ndarray:
    """Remembered, since most cases of a set are alike and a singular value decomposition each adds up.

    nibabel, which takes a tenth of a second to load, is asked of oblique axes alone.
    """
    matrix = np.frombuffer(linear, dtype=np.float64).reshape(3, 3)
    along = matrix != 0
    if (along.sum(axis=0) == 1).all() and (along.sum(axis=1) == 1).all():
        axes = along.argmax(axis=0)
        return np.stack([axes, np.sign(matrix[axes, np.arange(3)])], axis=1).astype(np.float64)
    from nibabel.orientations import io_orientation

    affine = np.eye(4)
    affine[:3, :3] = matrix
    return np.asarray(io_orientation(affine))
