"""Owns what the files of a folder say of themselves before any pixel is decoded: one DICOM instance a file."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fasttrain.data.dicom.library import load
from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.nifti import is_nifti
from fasttrain.errors import DataError
from fasttrain.wording import counted

Stamp = tuple[tuple[str, int, int, int], ...]
"""Of a folder: name, size and both times of change of each file in it."""

SEG_CLASSES = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
"""Segmentation Storage, and Label Map Segmentation Storage."""
RTSTRUCT_CLASS = "1.2.840.10008.5.1.4.1.1.481.3"
_DIRECTORY_CLASS = "1.2.840.10008.1.3.10"
_DEFLATED = "1.2.840.10008.1.2.1.99"
"""Of such a file the place where reading stopped says nothing."""
_MAGIC = b"DICM"
_TAGS = [
    "SOPClassUID",
    "SOPInstanceUID",
    "SeriesInstanceUID",
    "SeriesNumber",
    "SeriesDescription",
    "Modality",
    "InstanceNumber",
    "FrameOfReferenceUID",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "Rows",
    "Columns",
    "NumberOfFrames",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "BitsAllocated",
    "PixelRepresentation",
    "SliceThickness",
    "RescaleSlope",
    "RescaleIntercept",
    "ModalityLUTSequence",
    "AcquisitionNumber",
    "EchoNumbers",
    "TemporalPositionIdentifier",
    "TriggerTime",
    "DiffusionBValue",
    "ImageType",
    "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
    "ReferencedSeriesSequence",
    "SegmentSequence",
    "ReferencedFrameOfReferenceSequence",
    "StructureSetROISequence",
]
_MOST_FOLDERS, _MOST_FILES = 4096, 100_000
"""Remembered at a time."""
_JUST_NOW_NS = 1_000_000_000
"""Times of a file that changed so lately might not tell of a further change."""


@dataclass(frozen=True, eq=False)
class Instance:
    """One DICOM file: `header` has the attributes that place and scale its pixels by keyword, but not the pixels."""

    path: Path
    series: str
    sop_class: str
    header: Mapping[str, Any]

    @property
    def number(self) -> int | None:
        """SeriesNumber, None where there is none."""
        number = self.header.get("SeriesNumber")
        return number if isinstance(number, int) else None

    @property
    def description(self) -> str:
        """SeriesDescription, empty where there is none."""
        return " ".join(str(self.header.get("SeriesDescription", "")).split())

    @property
    def modality(self) -> str:
        return str(self.header.get("Modality", ""))

    @property
    def is_image(self) -> bool:
        """Whether it holds slices, and not a mask, a plan, a report or the like."""
        return "Rows" in self.header and self.sop_class not in SEG_CLASSES


@dataclass(frozen=True, eq=False)
class Folder:
    """The DICOM instances directly in a folder by the names of their files, and {file that is none: why}."""

    instances: tuple[Instance, ...]
    others: Mapping[Path, str]


_SEEN: dict[Path, tuple[Stamp, Folder]] = {}
_WRITING = threading.Lock()


def stamp_of(folder: Path) -> Stamp:
    """What tells an unchanged folder from a changed one; empty where it cannot be listed."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file():
                    seen = entry.stat()
                    found.append((entry.name, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns))
    return tuple(sorted(found))


def look_into(folder: Path) -> Folder:
    """The files of a folder, less hidden ones, those a system left behind, NIfTI files and DICOMDIR; remembered while unchanged.

    Raises DataError where it cannot be listed, MachineError where pydicom is missing.
    """
    stamp = stamp_of(folder)
    known = _SEEN.get(folder)
    if known is not None and known[0] == stamp:
        return known[1]
    instances, others = [], {}
    for name, *_ in stamp:
        path = folder / name
        if name.startswith(".") or is_left_behind(name) or is_nifti(path):
            continue
        found = _read(path)
        if isinstance(found, str):
            others[path] = found
        elif found.sop_class != _DIRECTORY_CLASS:
            instances.append(found)
    looked = Folder(tuple(instances), MappingProxyType(others))
    newest = max((max(seen[2:]) for seen in stamp), default=0)
    if abs(time.time_ns() - newest) < _JUST_NOW_NS:
        return looked
    with _WRITING:
        if len(_SEEN) >= _MOST_FOLDERS or sum(len(one.instances) for _, one in _SEEN.values()) > _MOST_FILES:
            _SEEN.clear()
        _SEEN[folder] = (stamp, looked)
    return looked


def is_dicom(path: Path) -> bool:
    """Whether the file has DICOM's preamble."""
    try:
        with open(path, "rb") as stream:
            return stream.read(132)[128:] == _MAGIC
    except OSError:
        return False


def instance_of(path: Path) -> Instance:
    """The instance of one file; raises DataError where it is none."""
    found = next((one for one in look_into(path.parent).instances if one.path == path), None)
    if found is None:
        raise DataError(f"{path} {look_into(path.parent).others.get(path, 'does not exist')}")
    return found


def told(series: Sequence[Instance]) -> str:
    """A series for people: `series 3 "T1 post" (MR, 40 files)`."""
    first = series[0]
    number = f" {first.number}" if first.number is not None else ""
    name = f' "{first.description}"' if first.description else ""
    return f"series{number}{name} ({first.modality or 'no modality'}, {counted(len(series), 'file')})"


def plain_name(name: str) -> str:
    """How names of series and structures are compared: without regard to case, spaces and Unicode form."""
    return " ".join(as_text(name).split()).casefold()


def _read(path: Path) -> Instance | str:
    """The instance, or what is wrong with the file in a few words."""
    if not is_dicom(path):
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                return "is empty (0 bytes)"
        return "is no DICOM file (without its preamble)"
    pydicom = load("pydicom", f"{path}, a DICOM file,")
    try:
        with open(path, "rb") as stream:
            dataset = pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=_TAGS)
            follows = stream.read(2)
        header = _plain(dataset, pydicom)
        sop_class = pydicom.uid.UID(header.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID") or "")
        deflated = dataset.file_meta.get("TransferSyntaxUID") == _DEFLATED
        # pydicom takes what there is of a file that ends early, which would then be no image and no slice that is missing
        if not follows and sop_class.name.endswith("Image Storage") and not deflated:
            return "is a damaged DICOM file (cut short before its pixels)"
        series = header.get("SeriesInstanceUID", "")
        if not series and sop_class != _DIRECTORY_CLASS:
            return "is a damaged DICOM file (without SeriesInstanceUID)"
        return Instance(path, str(series), str(sop_class), header)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except Exception as error:  # pydicom raises whatever its parsers come across in damaged bytes
        return f"is a damaged DICOM file ({' '.join(str(error).split())[:120] or type(error).__name__})"


def _plain(dataset: Any, pydicom: Any) -> dict[str, Any]:
    """{keyword: value} of what is not empty, in Python's own types: a tenth of the memory, and looked up at once."""
    found: dict[str, Any] = {}
    for tag in dataset.keys():  # noqa: SIM118, iterating over a dataset decodes every value
        try:
            value = _plain_value(dataset[tag].value, pydicom)
        except Exception:  # a value that is none of its kind is told of where it is needed
            value = str(dataset.get_item(tag).value)
        if value is not None and value != "":
            found[pydicom.datadict.keyword_for_tag(tag)] = value
    return found


def _plain_value(value: Any, pydicom: Any) -> Any:
    if isinstance(value, pydicom.sequence.Sequence):
        return [_plain(item, pydicom) for item in value]
    if isinstance(value, pydicom.multival.MultiValue):
        return tuple(_plain_value(one, pydicom) for one in value)
    if value is None or isinstance(value, str):
        return value if value is None else str(value)
    if isinstance(value, int):
        return int(value)
    return float(value)
