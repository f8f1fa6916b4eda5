"""Owns reading a DICOM segmentation (SEG): its frames put on the slices of the image they were drawn on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.dicom.drawing import LabelMap, Piece
from fasttrain.data.dicom.instances import instance_of
from fasttrain.data.dicom.library import load
from fasttrain.data.dicom.slices import plane_affine, slices_in
from fasttrain.data.dicom.stack import Stack, stack_of
from fasttrain.data.grids import ALIGNED_VOXELS, reoriented
from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError, FasttrainError
from fasttrain.samples import Drawn, Grid


def read_segmentation(path: Path, drawn: Drawn) -> NiftiFile:
    """The label map of a SEG on the grid of `drawn.image`; frames that are not there are empty, as the standard has it.

    Raises DataError for fractional segments, frames that do not lie on the image's voxels, and what `LabelMap` refuses.
    """
    stack = stack_of(drawn.image)
    highdicom = load("highdicom", f"{path}, a DICOM segmentation,")
    try:
        segments = highdicom.seg.segread(path)
        kind = str(segments.SegmentationType)
        if kind == "FRACTIONAL":
            raise DataError(f"{path} holds fractional segments; one value a voxel is expected, so write it as BINARY")
        # In a label map the background may be described too, as segment 0
        described = [one for one in segments.SegmentSequence if int(one.SegmentNumber)]
        numbers = [int(one.SegmentNumber) for one in described]
        names = [str(one.SegmentLabel) for one in described]
        label_map = LabelMap(path, stack, drawn)
        wanted = [(names[place], numbers[place], value) for place, value in label_map.wanted(names)]
        frames = _Frames(path, segments, stack)
        for name, number, value in wanted:
            label_map.draw(name, value, frames.of(number, kind == "LABELMAP"))
    except (FasttrainError, MemoryError):
        raise
    except Exception as error:  # highdicom raises whatever it comes across in damaged files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} cannot be read as a DICOM segmentation ({reason}); get the file anew") from error
    return label_map.finished()


class _Frames:
    """Where each frame of a segmentation lies on the image, and of which segment it is."""

    def __init__(self, path: Path, segments: Any, stack: Stack) -> None:
        self._path = path
        self._segments = segments
        self._stack = stack
        self._grid = Grid(stack.shape, stack.affine)
        self._planes = slices_in(instance_of(path))
        groups = segments.PerFrameFunctionalGroupsSequence
        self._owners = [_segment_of(group, segments) for group in groups]

    def of(self, number: int, label_map: bool) -> Iterator[Piece]:
        """The frames of a segment; of a label map all of them, with the voxels of that value."""
        for place, (plane, owner) in enumerate(zip(self._planes, self._owners, strict=True)):
            if label_map or owner == number:
                pixels = self._segments.get_stored_frame(place + 1)
                mask = (pixels == number) if label_map else (pixels != 0)
                if mask.any():
                    yield self._piece(np.asarray(mask).T[:, :, None], plane)

    def _piece(self, mask: np.ndarray, plane: Any) -> Piece:
        affine = plane_affine(plane.position, plane.orientation, plane.spacing, 1.0)
        turned, grid = reoriented(mask, Grid(mask.shape, affine), self._grid)
        index = np.linalg.solve(self._stack.affine, grid.affine)
        corner = np.rint(index[:3, 3])
        # How far the last pixel of the frame lies from the voxel that it would be
        last = np.array(turned.shape, dtype=np.float64) - 1
        off = max(
            float(np.abs(index[:3, 3] - corner).max()),
            float(np.abs(index[:3, :3] @ last + index[:3, 3] - corner - last).max()),
        )
        if not off <= ALIGNED_VOXELS:
            raise DataError(
                f"{self._path} has a frame that lies {off:.3g} voxels beside those of {self._stack.title}, but "
                f"{ALIGNED_VOXELS} are allowed; it was drawn on another image, or is to be resampled onto this one"
            )
        return Piece((int(corner[0]), int(corner[1]), int(corner[2])), turned)


def _segment_of(group: Any, segments: Any) -> int | None:
    """The number of the segment a frame belongs to; None in a label map, whose frames hold the numbers."""
    shared = (segments.get("SharedFunctionalGroupsSequence") or [{}])[0]
    for place in (group, shared):
        found = place.get("SegmentIdentificationSequence")
        if found:
            return int(found[0].ReferencedSegmentNumber)
    return None
