"""Owns a label map in the making: structures by name become values, and what is ambiguous is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.data.dicom.instances import plain_name
from fasttrain.data.dicom.pixels import nifti_header
from fasttrain.data.dicom.stack import Stack
from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError
from fasttrain.samples import Drawn
from fasttrain.wording import counted

_NAMED = 8


@dataclass(frozen=True, eq=False)
class Piece:
    """Voxels of a structure: `mask` [column, row, slice], bool, whose first voxel is the voxel `corner` of the label map."""

    corner: tuple[int, int, int]
    mask: np.ndarray


class LabelMap:
    """Draws structures on the grid of an image: where two values would meet in one voxel, it says so."""

    def __init__(self, path: Path, stack: Stack, drawn: Drawn) -> None:
        self.path = path
        self.stack = stack
        self._drawn = drawn
        # Slice by slice, as NIfTI stores it
        self._values = np.zeros(stack.shape, dtype=np.uint8, order="F")
        self._met: Counter[tuple[int, int]] = Counter()
        self._outside: Counter[str] = Counter()

    def wanted(self, names: Sequence[str]) -> Iterator[tuple[int, int]]:
        """(place in `names`, value) of the structures to draw, in the order of drawing.

        Raises DataError for names that no value is known for, unless these are to be left out.
        """
        plain = [plain_name(name) for name in names]
        values = {plain_name(name): value for name, value in self._drawn.values}
        unknown = [name for name, own in zip(names, plain, strict=True) if own not in values]
        if unknown and self._drawn.others == "refuse":
            raise DataError(self._unknown(unknown))
        order = {name: place for place, name in enumerate(values)}
        known = sorted((order[own], place, values[own]) for place, own in enumerate(plain) if own in values)
        return ((place, value) for _, place, value in known if value)

    def draw(self, name: str, value: int, pieces: Iterable[Piece]) -> None:
        """Gives the voxels of the pieces the value; those outside the image are counted."""
        for piece in pieces:
            spans, inside = [], piece.mask
            for axis, (first, length) in enumerate(zip(piece.corner, self.stack.shape, strict=True)):
                begin, end = max(first, 0), max(min(first + piece.mask.shape[axis], length), max(first, 0))
                spans.append(slice(begin, end))
                inside = inside[(slice(None),) * axis + (slice(begin - first, max(end - first, 0)),)]
            lost = int(np.count_nonzero(piece.mask)) - int(np.count_nonzero(inside))
            if lost:
                self._outside[name] += lost
            there = self._values[tuple(spans)]
            taken = there[inside & (there != 0) & (there != value)]
            if taken.size and not self._drawn.in_order:
                self._met.update({(int(other), value): int(count) for other, count in _counts(taken)})
            there[inside] = value

    def finished(self) -> NiftiFile:
        """The label map. Raises DataError for voxels of two structures and for structures that reach beyond the image."""
        faults = [
            f"{self.path} has {counted(count, 'voxel')} of {name!r} outside {self.stack.title}; it was drawn on another image"
            for name, count in self._outside.items()
        ]
        names = {value: name for name, value in reversed(self._drawn.values)}
        faults += [
            f"{self.path} has {counted(count, 'voxel')} that belong to both {names[one]!r} and {names[other]!r}; name the "
            "structures in the order in which they are to be drawn with data.source.structures, the last one on top"
            for (one, other), count in self._met.items()
        ]
        if faults:
            raise DataError(faults)
        self._values.flags.writeable = False
        header = nifti_header(self.path, self.stack.shape, self.stack.affine, np.uint8)
        return NiftiFile(header=header, raw=self._values, slope=1.0, intercept=0.0)

    def _unknown(self, unknown: Sequence[str]) -> str:
        listed = ", ".join(map(repr, unknown[:_NAMED]))
        if len(unknown) > _NAMED:
            listed += f" and {len(unknown) - _NAMED} more"
        known = ", ".join(repr(name) for name, _ in self._drawn.values)
        return (
            f"{self.path} holds {'structures' if len(unknown) > 1 else 'a structure'} of the name {listed}, but known are "
            f"{known}; give every structure its label value with data.source.structures (0 draws nothing), or leave others "
            "out with data.source.other_structures: skip"
        )


def _counts(values: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(*(found.tolist() for found in np.unique(values, return_counts=True)), strict=True)
