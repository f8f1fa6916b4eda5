"""Owns where training patches are cut from their cases, and the cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fasttrain.augment import Chances
from fasttrain.recipe.data_spec import PatchSpec
from fasttrain.samples import Sample

_NONE = np.empty(0, np.uint16)


@dataclass(frozen=True, eq=False)
class CaseCentres:
    """What a draw of corners needs of one case: its shape, and its tables of centres as in `Sample`, without its volumes."""

    shape: tuple[int, ...]
    foreground: tuple[np.ndarray, ...]
    background: np.ndarray

    @classmethod
    def of(cls, sample: Sample) -> CaseCentres:
        """Those of a sample, whose tables are shared and not copied."""
        background = sample.background_centres
        return cls(
            tuple(sample.image.shape[1:]),
            tuple(table.numpy() for table in sample.centres),
            background.numpy() if background is not None else _NONE,
        )


class CentreTables:
    """The centres of many cases behind one another, so that the corners of a whole batch are drawn at once.

    Cases may be of different shapes; all have as many classes. The tables take the type of the largest case's.
    """

    def __init__(self, cases: Iterable[CaseCentres]) -> None:
        cases = tuple(cases)
        self.shapes = np.array([case.shape for case in cases], dtype=np.int64)
        pieces = [table for case in cases for table in (*(case.foreground or (_NONE,)), case.background)]
        counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._voxels = np.concatenate(pieces)
        self._starts = (np.cumsum(counts) - counts).reshape(len(cases), -1)  # [case, class and then background]
        self._counts = counts.reshape(len(cases), -1)
        present = self._counts[:, :-1] > 0
        self._present = np.argsort(~present, axis=1, kind="stable")  # the classes that a case has come first
        self._present_count = present.sum(axis=1)
        self._foreground_count = self._counts[:, :-1].sum(axis=1)

    def corners(self, cases: np.ndarray | Sequence[int], patch: PatchSpec, chances: Chances) -> np.ndarray:
        """The first voxels, int64 [n, d], of patches inside the cases of these indices [n], which must be at least patch-sized.

        A share `patch.foreground` of the patches has a foreground voxel at its centre, as near as the volume's edge allows
        (nnU-Net's and MONAI's RandCropByPosNegLabel's way); a case without foreground gives a patch from anywhere.
        """
        cases = np.asarray(cases, dtype=np.int64)
        dimensions, size = self.shapes.shape[1], np.array(patch.size, dtype=np.int64)
        draws = chances("corner", 3 + dimensions).numpy().astype(np.float64)
        shapes = self.shapes[cases]
        slack = shapes - size
        corners = _at(draws[:, 3:], slack + 1)
        places, counts = self._tables(cases, patch, draws)
        centred = np.flatnonzero(counts)
        voxels = self._voxels[places[centred]].astype(np.int64)
        for axis in reversed(range(dimensions)):
            voxels, place = np.divmod(voxels, shapes[centred, axis])
            corners[centred, axis] = np.minimum(np.maximum(place - size[axis] // 2, 0), slack[centred, axis])
        return corners

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


def cut(volume: Tensor, corner: Iterable[int], size: tuple[int, ...]) -> Tensor:
    """A view of `volume` [channel, *spatial], `size` voxels from `corner` on."""
    box = (slice(None), *(slice(first, first + length) for first, length in zip(corner, size, strict=True)))
    return volume[box]


def _at(chances: np.ndarray, counts: np.ndarray) -> Any:
    """A number from 0 up to and without each of `counts`; 0 where that is 0."""
    return (chances * counts).astype(np.int64)
