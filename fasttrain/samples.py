"""Owns the values that flow from files to the network: Case (files) → Sample (one preprocessed volume) → Batch (patches)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch


IGNORED = 255
"""The class index of voxels that are no class's: those of `data.ignore_label`. A recipe that has one has at most 254 classes."""


@dataclass(frozen=True)
class Drawn:
    """How a label that has structures by name and no grid of its own (a DICOM SEG or RTSTRUCT) becomes a label map.

    image: the image on whose grid it is drawn. values: (name of a structure, its label value). in_order: later ones of `values`
    are drawn over earlier ones, else voxels of two values are refused. others: what becomes of structures not in `values`.
    """

    image: Path
    values: tuple[tuple[str, int], ...]
    in_order: bool
    others: Literal["refuse", "skip"]


@dataclass(frozen=True)
class Case:
    """The files of one subject.

    `images` holds one path with all channels, or one path a channel, in the recipe's channel order; of a DICOM series it is
    the path of its first file by name, which stands for all of them. `label` is None where there is no reference (test cases,
    `predict`), and `drawn` says how it becomes a label map where it is none. `name` is the id by which image and label were
    paired.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | None
    drawn: Drawn | None = None


@dataclass(frozen=True, eq=False)
class Grid:
    """A voxel grid in the world: `shape` in voxels and `affine`, a 4×4 float64 matrix from voxel index to RAS mm."""

    shape: tuple[int, ...]
    affine: np.ndarray


@dataclass(frozen=True, eq=False)
class Sample:
    """One preprocessed volume on the CPU.

    image: [channel, *spatial], in the recipe's `data.storage_dtype`.
    label: [1, *spatial], uint8 class indices (0 … classes − 1, or IGNORED where the recipe has an ignore label), or None. Of a
    dose
        int16: bit n is set inside structure n, the bit after the last inside the possible dose mask; the dose, over its scale, is
        the image's last channel.
    centres: one tensor [n] a foreground class, flat C-order indices of voxels of that class (at most `CENTRES_PER_CLASS` of
        them, evenly drawn), from which foreground crops take their centre; uint16 where the volume has at most 65 536 voxels,
        else int32.
    filled: of a volume that is cut into slices, which then lie along its first spatial axis, uint8 [slice]: whether one holds a
        class.
    background_centres: the like, voxels with label 0 and an image above `patch.background_above`; None where that is null.
    grid: the grid of `image`; source_grid: the grid of the file, to which predictions are brought back.
    """

    name: str
    image: torch.Tensor
    label: torch.Tensor | None
    centres: tuple[torch.Tensor, ...]
    background_centres: torch.Tensor | None
    grid: Grid
    source_grid: Grid
    filled: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """What one forward pass sees.

    image: [batch, channel, *patch] float32 (or the storage dtype), with neighbouring slices the channels of the lowest first;
    label: [batch, 1, *patch] uint8, as a Sample's.
    positions: the global sample positions of the patches (see `batches.order`), and `names` the cases they came from.
    """

    image: torch.Tensor
    label: torch.Tensor
    positions: tuple[int, ...]
    names: tuple[str, ...]


@runtime_checkable
class CaseSource(Protocol):
    """Preprocessed volumes by index; one implementation a cache kind."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def close(self) -> None: ...


class BatchSource(Protocol):
    """Batches from a given sample position on, for ever; how they are made is the implementation's own business. Of several ranks
    each has the batches whose turn it is, or, where they are asked for `alike`, the same ones.

    waited_for: whether the seconds until a batch is there are seconds in which the device has nothing to do. They are not where
    the device makes its batches itself, in its own order of work. Looked at after each batch, it may differ from one to
    the next.
    """

    waited_for: bool

    def batches(self, first_position: int, alike: bool = False) -> Iterator[Batch]: ...

    def close(self) -> None: ...
