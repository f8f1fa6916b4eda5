"""Owns single slices: where a header places its pixels in the patient, and how it scales their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.dicom.instances import Instance
from fasttrain.errors import DataError

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
SAME_DIRECTION = 1e-3
"""Direction cosines that differ by less are rounding: 0.5 mm at the end of 512 mm."""


@dataclass(frozen=True, eq=False)
class Slice:
    """One plane of pixels: `frame` of a file (0 where it has one), placed in the patient in mm, and how values are scaled."""

    path: Path
    frame: int
    position: np.ndarray
    orientation: np.ndarray
    spacing: tuple[float, float]
    slope: float
    intercept: float
    header: Any


def slices_in(instance: Instance) -> list[Slice]:
    """The slice of a file, or all of a multi-frame file; raises DataError for one without a place or of more than one value."""
    header, path = instance.header, instance.path
    samples, kind = (
        int(header.get("SamplesPerPixel") or 1),
        str(header.get("PhotometricInterpretation") or "MONOCHROME2"),
    )
    if samples != 1 or not kind.startswith("MONOCHROME"):
        raise DataError(f"{path} holds {kind} pixels; one number a pixel is expected, so leave colour images out")
    if header.get("ModalityLUTSequence"):
        raise DataError(
            f"{path} scales its values by a table (ModalityLUTSequence), not by slope and intercept; convert it first"
        )
    frames = int(header.get("NumberOfFrames") or 1)
    if frames == 1 and header.get("ImagePositionPatient") is not None:
        return [_slice(path, 0, header, header, header, header)]
    groups = list(header.get("PerFrameFunctionalGroupsSequence") or ())
    if len(groups) != frames:
        lacks = "frames without places" if frames > 1 else "no ImagePositionPatient"
        raise DataError(f"{path} has {lacks}, so its slices cannot be put in order; leave the file out")
    shared = (header.get("SharedFunctionalGroupsSequence") or [{}])[0]
    return [
        _slice(
            path,
            number,
            header,
            _group("PlanePositionSequence", group, shared),
            _group("PlaneOrientationSequence", group, shared),
            _group("PixelMeasuresSequence", group, shared),
            _group("PixelValueTransformationSequence", group, shared),
        )
        for number, group in enumerate(groups)
    ]


def plane_affine(position: np.ndarray, orientation: np.ndarray, spacing: Sequence[float], step: float) -> np.ndarray:
    """From (column, row, slice) to RAS mm, 4×4: position of the first pixel, cosines of rows then columns, PixelSpacing."""
    along_row, along_column = orientation[:3], orientation[3:]
    affine = np.eye(4)
    affine[:3, 0] = along_row * spacing[1]
    affine[:3, 1] = along_column * spacing[0]
    affine[:3, 2] = np.cross(along_row, along_column) * step
    affine[:3, 3] = position
    return _LPS_TO_RAS @ affine


def _group(name: str, *places: Any) -> Any:
    for place in places:
        found = place.get(name)
        if found:
            return found[0]
    return {}


def _slice(
    path: Path, frame: int, header: Any, place: Any, direction: Any, measures: Any, scaling: Any | None = None
) -> Slice:
    scaling = header if scaling is None else scaling
    position = _numbers(path, place, "ImagePositionPatient", 3)
    orientation = _numbers(path, direction, "ImageOrientationPatient", 6)
    spacing = _numbers(path, measures, "PixelSpacing", 2)
    row, column = orientation[:3], orientation[3:]
    crooked = max(abs(row @ row - 1), abs(column @ column - 1), abs(row @ column))
    if crooked > 10 * SAME_DIRECTION or spacing.min() <= 0:
        raise DataError(
            f"{path} has ImageOrientationPatient {spelt(orientation)} and PixelSpacing {spelt(spacing)}; two perpendicular "
            "directions of length 1 and distances above 0 are expected, so mend the file"
        )
    slope = number_of(path, scaling, "RescaleSlope", 1.0)
    if slope == 0:
        raise DataError(f"{path} has RescaleSlope 0, which makes all its values one; mend the file")
    return Slice(
        path,
        frame,
        position,
        orientation,
        (float(spacing[0]), float(spacing[1])),
        slope,
        number_of(path, scaling, "RescaleIntercept", 0.0),
        header,
    )


def _numbers(path: Path, place: Any, name: str, count: int) -> np.ndarray:
    found = place.get(name)
    try:
        values = np.array([float(one) for one in found], dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if len(values) != count or not np.isfinite(values).all():
        lacks = f"no {name}" if found is None else f"{name} {found!s:.60}, where {count} numbers are expected"
        raise DataError(f"{path} has {lacks}, so it cannot be placed among the slices; leave the file out")
    return values


def number_of(path: Path, place: Any, name: str, default: float) -> float:
    """A number of a header; raises DataError where there is something else."""
    found = place.get(name)
    if found is None or str(found) == "":
        return default
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = np.nan
    if not np.isfinite(value):
        raise DataError(f"{path} has {name} {found!s:.40}, where a number is expected; mend the file")
    return value


def spelt(value: Any, by: str = " ") -> str:
    """Numbers of a header in a sentence; text as it is."""
    if isinstance(value, str):
        return value
    return by.join(f"{float(one):.4g}" for one in value)
