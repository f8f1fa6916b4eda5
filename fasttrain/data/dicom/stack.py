"""Owns the geometry of a series: its slices in order along their normal, one voxel grid, and all that keeps it from being one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.dicom.instances import instance_of, look_into, told
from fasttrain.data.dicom.slices import SAME_DIRECTION, Slice, number_of, plane_affine, slices_in, spelt
from fasttrain.errors import DataError
from fasttrain.wording import counted

_UNEVEN = 0.1
"""Of the distance between slices: so far may a slice lie from its place in an even stack, as corners of grids may."""
_SAME_PLACE = 1e-3
_NAMED = 4
_TELLING = (
    "AcquisitionNumber",
    "EchoNumbers",
    "TemporalPositionIdentifier",
    "TriggerTime",
    "DiffusionBValue",
    "ImageType",
)
"""Attributes by which slices at one place differ: phases, echoes, directions."""


@dataclass(frozen=True, eq=False)
class Stack:
    """A series as a volume [column, row, slice]: slices by rising position along the normal, affine 4×4 to RAS mm."""

    title: str
    slices: tuple[Slice, ...]
    shape: tuple[int, int, int]
    affine: np.ndarray
    frame_of_reference: str

    @property
    def scales(self) -> set[tuple[float, float]]:
        """Every (slope, intercept) that occurs."""
        return {(one.slope, one.intercept) for one in self.slices}


def stack_of(path: Path) -> Stack:
    """The series that the file belongs to, from the headers of all its files in the folder.

    Raises DataError with every fault: slices of differing size, direction, spacing or type, two at one place, uneven gaps, and
    slices that cannot be placed. Files that are no DICOM are the business of whoever finds the cases.
    """
    first = instance_of(path)
    if not first.is_image:
        raise DataError(f"{path} is {first.modality or 'a DICOM file'} without pixels; a slice of an image is expected")
    inside = [one for one in look_into(path.parent).instances if one.series == first.series and one.is_image]
    title = f"{path.parent}: {told(inside)}"
    faults: list[str] = []
    slices = []
    for instance in inside:
        try:
            slices.extend(slices_in(instance))
        except DataError as error:
            faults.extend(error.faults)
    if faults:
        raise DataError(faults)
    faults = [fault for fault in (_mixed(title, slices, *one) for one in _ALIKE) if fault is not None]
    if faults:
        raise DataError(faults)
    return _stacked(title, slices)


def _size(one: Slice) -> Hashable:
    return int(one.header.get("Columns") or 0), int(one.header.get("Rows") or 0)


def _frame_of_reference(one: Slice) -> str:
    return str(one.header.get("FrameOfReferenceUID") or "none")


def _pixel_type(one: Slice) -> str:
    return (
        f"{one.header.get('BitsAllocated')} bits, {'signed' if one.header.get('PixelRepresentation') else 'unsigned'}"
    )


_ALIKE: tuple[tuple[str, Callable[[Slice], Any], float], ...] = (
    ("slices of differing size (columns×rows)", _size, 0.0),
    ("slices of differing orientation", lambda one: tuple(one.orientation), SAME_DIRECTION),
    ("slices of differing PixelSpacing", lambda one: one.spacing, 1e-4),
    ("slices of differing FrameOfReferenceUID", _frame_of_reference, 0.0),
    ("slices of differing pixel type", _pixel_type, 0.0),
)
"""What all slices of a volume share: how a mixture is called, the value, and how far numbers may differ."""


def _mixed(
    title: str, slices: Sequence[Slice], what: str, value: Callable[[Slice], Any], tolerance: float
) -> str | None:
    groups: Counter[Any] = Counter()
    for one in slices:
        own = value(one)
        groups[next((known for known in groups if _near(known, own, tolerance)), own)] += 1
    if len(groups) == 1:
        return None
    counts = ", ".join(
        f"{count} of {spelt(own, '×' if what.endswith('rows)') else ' ')}" for own, count in groups.most_common(_NAMED)
    )
    more = f" and {len(groups) - _NAMED} more kinds" if len(groups) > _NAMED else ""
    return f"{title} has {what}: {counts}{more}; a volume has one, so move the other files out of the folder"


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if not tolerance:
        return bool(one == other)
    return bool(np.abs(np.subtract(one, other)).max() <= tolerance)


def _stacked(title: str, slices: list[Slice]) -> Stack:
    orientation, spacing = slices[0].orientation, slices[0].spacing
    normal = np.cross(orientation[:3], orientation[3:])
    slices = sorted(slices, key=lambda one: float(one.position @ normal))
    places = np.array([one.position @ normal for one in slices])
    faults = [fault for fault in (_twice(title, slices, places), _uneven(title, slices, places)) if fault is not None]
    if faults:
        raise DataError(faults[:1])
    step = float(places[-1] - places[0]) / (len(slices) - 1) if len(slices) > 1 else _thickness(slices[0])
    affine = plane_affine(slices[0].position, orientation, spacing, step)
    drift = np.array([one.position - slices[0].position for one in slices])
    drift -= np.outer(places - places[0], normal)
    sideways = np.linalg.norm(drift, axis=1).max()
    if sideways > _UNEVEN * min(spacing):
        raise DataError(
            f"{title} has slices that lie up to {sideways:.4g} mm beside the line of their normal, as with a tilted gantry; "
            "correct the tilt first, for example with dcm2niix, and train on NIfTI"
        )
    rows, columns = int(slices[0].header["Rows"]), int(slices[0].header["Columns"])
    return Stack(title, tuple(slices), (columns, rows, len(slices)), affine, _frame_of_reference(slices[0]))


def _thickness(one: Slice) -> float:
    """Of a single slice, whose neighbours do not tell."""
    thickness = number_of(one.path, one.header, "SliceThickness", 1.0)
    return thickness if thickness > 0 else 1.0


def _twice(title: str, slices: Sequence[Slice], places: np.ndarray) -> str | None:
    twice = np.flatnonzero(np.diff(places) < _SAME_PLACE)
    if not len(twice):
        return None
    one, other = slices[twice[0]], slices[twice[0] + 1]
    differ = [name for name in _TELLING if one.header.get(name) != other.header.get(name)]
    why = (
        f"they differ in {', '.join(differ)}, so these are several volumes in one series" if differ else "one is a copy"
    )
    return (
        f"{title} has two slices at one place, {counted(len(twice), 'time')}, such as {one.path.name} and {other.path.name} at "
        f"{places[twice[0]]:.4g} mm: {why}; leave the files of one volume in the folder"
    )


def _uneven(title: str, slices: Sequence[Slice], places: np.ndarray) -> str | None:
    if len(places) < 3:
        return None
    gaps = np.diff(places)
    usual = _usual(gaps)
    off = np.flatnonzero(np.abs(gaps - usual) > _UNEVEN * usual)
    even = places[0] + np.arange(len(places)) * (places[-1] - places[0]) / (len(places) - 1)
    if not len(off) and np.abs(places - even).max() <= _UNEVEN * usual:
        return None
    if not len(off):
        return (
            f"{title} has slices from {gaps.min():.6g} to {gaps.max():.6g} mm apart, which adds up to more than {_UNEVEN:g} of "
            "a slice; convert it to even slices first"
        )
    first = int(off[0])
    times = gaps[off] / usual
    whole = bool((np.abs(times - np.rint(times)) < _UNEVEN).all() and times.min() > 1.5)
    lacking = int(np.rint(times).sum()) - len(off)
    why = f"{counted(lacking, 'slice')} missing" if whole else "the gaps are uneven"
    where = (
        f"{gaps[first]:.4g} mm between {slices[first].path.name} (at {places[first]:.4g} mm) and {slices[first + 1].path.name}, "
        f"where {usual:.4g} mm are usual"
    )
    more = f", and {counted(len(off) - 1, 'more such gap')}" if len(off) > 1 else ""
    return f"{title}: {why}, {where}{more}; get the series anew, or resample it to even slices first"


def _usual(gaps: np.ndarray) -> float:
    """The gap that most others are like, of several the smallest: where slices are missing, gaps are multiples of it."""
    alike = np.abs(gaps[:, None] - gaps) <= _UNEVEN * gaps[:, None]
    counts = alike.sum(axis=1)
    best = min(np.flatnonzero(counts == counts.max()), key=lambda place: gaps[place])
    return float(np.median(gaps[alike[best]]))
