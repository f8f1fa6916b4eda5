"""Owns where training patches are cut from their cases, and the cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttrain.augment import Chances
from fasttrain.recipe.patch_spec import PatchSpec
from fasttrain.samples import Sample

_NONE = np.empty(0, np.uint16)

SliceOf = Callable[[np.ndarray, Callable[[int], np.ndarray]], np.ndarray]
"""From rows of a batch [k], and a function from a number below k to bool [slice] of that row's case, to slices [k]."""


@dataclass(frozen=True, eq=False)
class CaseCentres:
    """What a draw of corners needs of one case: its shape, its tables of centres as in `Sample` and which of its slices are
    filled, without its volumes.
    """

    shape: tuple[int, ...]
    foreground: tuple[np.ndarray, ...]
    background: np.ndarray
    filled: np.ndarray | None = None

    @classmethod
    def of(cls, sample: Sample) -> CaseCentres:
        """Those of a sample, whose tables are shared and not copied."""
        background = sample.background_centres
        return cls(
            tuple(sample.image.shape[1:]),
            tuple(table.numpy() for table in sample.centres),
            background.numpy() if background is not None else _NONE,
            sample.filled.numpy().astype(bool) if sample.filled is not None else None,
        )


class CentreTables:
    """The centres of many cases behind one another, so that the corners of a whole batch are drawn at once.

    Cases may be of different shapes; all have as many classes. The tables take the type of the largest case's.
    """

    def __init__(self, cases: Iterable[CaseCentres]) -> None:
        cases = tuple(cases)
        self.shapes = np.array([case.shape for case in cases], dtype=np.int64)
        self._filled = [case.filled for case in cases]
        pieces = [table for case in cases for table in (*(case.foreground or (_NONE,)), case.background)]
        counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._voxels = np.concatenate(pieces)
        self._starts = (np.cumsum(counts) - counts).reshape(len(cases), -1)  # [case, class and then background]
        self._counts = counts.reshape(len(cases), -1)
        present = self._counts[:, :-1] > 0
        self._present = np.argsort(~present, axis=1, kind="stable")  # the classes that a case has come first
        self._present_count = present.sum(axis=1)
        self._foreground_count = self._counts[:, :-1].sum(axis=1)

    def corners(
        self, cases: np.ndarray | Sequence[int], patch: PatchSpec, chances: Chances, slices: SliceOf | None = None
    ) -> np.ndarray:
        """The first voxels, int64 [n, d], of patches inside the cases of these indices [n], which must be at least patch-sized.

        A patch of fewer axes than its case lies in one slice across the first, given by `slices` where the patch has no centre.

        A share `patch.foreground` of the patches has a foreground voxel at its centre, as near as the volume's edge allows
        (nnU-Net's and MONAI's RandCropByPosNegLabel's way); a case without foreground gives a patch from anywhere.
        """
        cases = np.asarray(cases, dtype=np.int64)
        dimensions = self.shapes.shape[1]
        size = np.array((1,) * (dimensions - len(patch.size)) + tuple(patch.size), dtype=np.int64)
        draws = chances("corner", 3 + dimensions).numpy().astype(np.float64)
        shapes = self.shapes[cases]
        slack = shapes - size
        corners = _at(draws[:, 3:], slack + 1)
        places, counts = self._tables(cases, patch, draws)
        centred = np.flatnonzero(counts)
        if slices is not None:
            free = np.flatnonzero(counts == 0)
            corners[free, 0] = slices(free, lambda row: self._filled_of(int(cases[free[row]])))
        voxels = self._voxels[places[centred]].astype(np.int64)
        for axis in reversed(range(dimensions)):
            voxels, place = np.divmod(voxels, shapes[centred, axis])
            corners[centred, axis] = np.minimum(np.maximum(place - size[axis] // 2, 0), slack[centred, axis])
        return corners

    def _filled_of(self, case: int) -> np.ndarray:
        filled = self._filled[case]
        return np.ones(self.shapes[case, 0], dtype=bool) if filled is None else filled

    def _tables(self, cases: np.ndarray, patch: PatchSpec, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each patch its centre's place among all voxels, and how many it was drawn from; of none: it lies anywhere."""
        foreground = draws[:, 0] < patch.foreground
        background = self._counts.shape[1] - 1
        if patch.foreground_by == "class":
            number = _at(draws[:, 1], self._present_count[cases])
            table = np.where(foreground, self._present[cases, number], background)
            counts = self._counts[cases, table]
        else:
            # Tables hold a share of a large class's voxels, so that a draw over them all is even over classes that fit in whole
            table = np.where(foreground, 0, background)
            counts = np.where(foreground, self._foreground_count[cases], self._counts[cases, background])
        chance = np.where(foreground, draws[:, 2], draws[:, 1])
        return self._starts[cases, table] + _at(chance, counts), counts


def cut_patch(volume: Tensor, corner: Sequence[int], size: tuple[int, ...], neighbours: int = 0) -> Tensor:
    """[channel, *size] of `volume` [channel, *spatial], from the voxel `corner` on; a view where that has the axes of `size`.

    A `size` of two axes is a patch in the slice `corner[0]` of a volume: [slice · channel, *size] of that slice and its
    `neighbours` on both sides, the lowest first. Beyond its ends a volume repeats its last slice.
    """
    if len(corner) == len(size):
        return cut(volume, corner, size)
    first, last = corner[0], volume.shape[1] - 1
    planes = cut(volume, (0, *corner[1:]), (last + 1, *size))
    if not neighbours:
        return planes[:, first]
    return torch.cat([planes[:, one] for one in around(first, neighbours, last)])


def around(first: int, neighbours: int, last: int) -> list[int]:
    """The slice `first` and its neighbours on both sides, none beyond 0 and `last`."""
    return [min(max(first + step, 0), last) for step in range(-neighbours, neighbours + 1)]


def cut(volume: Tensor, corner: Iterable[int], size: tuple[int, ...]) -> Tensor:
    """A view of `volume` [channel, *spatial], `size` voxels from `corner` on."""
    box = (slice(None), *(slice(first, first + length) for first, length in zip(corner, size, strict=True)))
    return volume[box]


def _at(chances: np.ndarray, counts: np.ndarray) -> Any:
    """A number from 0 up to and without each of `counts`; 0 where that is 0."""
    return (chances * counts).astype(np.int64)
