"""Owns reading a radiotherapy structure set (RTSTRUCT): closed contours filled on the slices of the image they were drawn on.

The reader on PyPI, rt-utils, has had no release since January 2023, needs OpenCV, and rounds every point of a contour to a whole
pixel before it fills it. Testing the voxels one by one for being in a polygon, as matplotlib does, takes four times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fasttrain.data.dicom.drawing import LabelMap, Piece
from fasttrain.data.dicom.library import load
from fasttrain.data.dicom.stack import Stack, stack_of
from fasttrain.data.nifti import NiftiFile
from fasttrain.errors import DataError, FasttrainError
from fasttrain.samples import Drawn

_OFF_SLICE = 0.1
"""Of the distance between slices: so far may a contour lie from the plane of one, as corners of grids may."""
_ON_LINE = 1e-3
"""In voxels: the middle of a voxel that lies on the contour itself, to which rounding has no say, is inside."""
_AREAS = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


def read_structure_set(path: Path, drawn: Drawn) -> NiftiFile:
    """The label map of an RTSTRUCT on the grid of `drawn.image`.

    A voxel is inside where its middle lies inside or on an odd number of a structure's contours on its slice, so that a contour
    within another is a hole. Points and open lines enclose nothing. Raises DataError for contours between the slices, and what
    `LabelMap` refuses.
    """
    stack = stack_of(drawn.image)
    pydicom = load("pydicom", f"{path}, a DICOM structure set,")
    try:
        dataset = pydicom.dcmread(path)
        names = {int(one.ROINumber): str(one.ROIName) for one in dataset.StructureSetROISequence}
        contours: dict[int, list[np.ndarray]] = defaultdict(list)
        for roi in dataset.get("ROIContourSequence") or ():
            for contour in roi.get("ContourSequence") or ():
                if contour.ContourGeometricType in _AREAS:
                    points = np.array(contour.ContourData, dtype=np.float64).reshape(-1, 3)
                    contours[int(roi.ReferencedROINumber)].append(points)
        # What encloses nothing, such as the isocentre, is no structure of the image
        numbers = [number for number in names if number in contours]
        label_map = LabelMap(path, stack, drawn)
        for place, value in label_map.wanted([names[number] for number in numbers]):
            name = names[numbers[place]]
            label_map.draw(name, value, _filled(path, name, contours[numbers[place]], stack))
    except (FasttrainError, MemoryError):
        raise
    except Exception as error:  # pydicom raises whatever its parsers come across in damaged bytes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} cannot be read as a DICOM structure set ({reason}); get the file anew") from error
    return label_map.finished()


def _filled(path: Path, name: str, contours: list[np.ndarray], stack: Stack) -> Iterator[Piece]:
    """One piece a slice that has contours."""
    by_slice: dict[int, list[np.ndarray]] = defaultdict(list)
    between = 0
    inverse = np.linalg.inv(stack.affine)
    for points in contours:
        # Contours are in the patient's LPS mm, grids in RAS
        index = (points * (-1.0, -1.0, 1.0)) @ inverse[:3, :3].T + inverse[:3, 3]
        plane = np.rint(index[:, 2].mean())
        if np.abs(index[:, 2] - plane).max() > _OFF_SLICE:
            between += 1
            continue
        by_slice[int(plane)].append(index[:, :2])
    if between:
        raise DataError(
            f"{path} has {between} of {len(contours)} contours of {name!r} between or across the slices of {stack.title}; it was "
            "drawn on another image"
        )
    for plane, outlines in sorted(by_slice.items()):
        yield _fill_slice(outlines, plane)


def _fill_slice(outlines: list[np.ndarray], plane: int) -> Piece:
    """The middles of voxels inside an odd number of outlines [point, (column, row)]."""
    corners = [_box(outline) for outline in outlines]
    low = np.min([low for low, _ in corners], axis=0)
    high = np.max([high for _, high in corners], axis=0)
    inside = np.zeros(tuple(high - low + 1), dtype=bool)
    for outline, (first, last) in zip(outlines, corners, strict=True):
        begin, end = first - low, last - low + 1
        inside[begin[0] : end[0], begin[1] : end[1]] ^= _inside(outline, first, last)
    return Piece((int(low[0]), int(low[1]), plane), inside[:, :, None])


def _box(outline: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last voxel (column, row) whose middle may be inside."""
    return np.floor(outline.min(axis=0)).astype(int), np.ceil(outline.max(axis=0)).astype(int)


def _inside(outline: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """[column, row] from the voxel `first` to the voxel `last`: by the even-odd rule, row by row, and on the line itself."""
    closed = np.concatenate([outline, outline[:1]])
    begins, ends = closed[:-1], closed[1:]
    # Each edge with each row that it crosses; a corner counts to the edge above it alone
    lows = np.ceil(np.minimum(begins[:, 1], ends[:, 1])).astype(int)
    counts = np.ceil(np.maximum(begins[:, 1], ends[:, 1])).astype(int) - lows
    edges = np.repeat(np.arange(len(counts)), counts)
    rows = lows[edges] + np.arange(len(edges)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, along = begins[edges], ends[edges] - begins[edges]
    columns = np.ceil(begin[:, 0] + (rows - begin[:, 1]) / along[:, 1] * along[:, 0]).astype(int)
    crossings = np.zeros(tuple(last - first + (2, 1)), dtype=np.int32)
    np.add.at(crossings, (columns - first[0], rows - first[1]), 1)
    # Inside is what has an odd number of crossings to its right
    inside = np.asarray(crossings[:0:-1].cumsum(axis=0)[::-1] & 1, dtype=bool)
    _add_line(inside, closed, first)
    return inside


def _add_line(inside: np.ndarray, closed: np.ndarray, first: np.ndarray) -> None:
    """The middles that lie on an edge, for which a count of crossings answers by rounding."""
    begins, ends = closed[:-1], closed[1:]
    lows = np.ceil(np.minimum(begins, ends) - _ON_LINE).astype(int)
    highs = np.floor(np.maximum(begins, ends) + _ON_LINE).astype(int)
    for edge in np.flatnonzero((lows <= highs).all(axis=1)):
        (low, high), along = (lows[edge], highs[edge]), ends[edge] - begins[edge]
        columns, rows = np.ogrid[low[0] : high[0] + 1, low[1] : high[1] + 1]
        across = np.abs(along[0] * (rows - begins[edge, 1]) - along[1] * (columns - begins[edge, 0]))
        near = across <= _ON_LINE * float(np.linalg.norm(along))
        place, end = low - first, high - first + 1
        inside[place[0] : end[0], place[1] : end[1]] |= near
