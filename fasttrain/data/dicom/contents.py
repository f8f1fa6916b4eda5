"""Owns what the folder of a case holds: series of images, masks that were drawn on them, and files that are neither."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.dicom.instances import RTSTRUCT_CLASS, SEG_CLASSES, Folder, Instance, look_into, plain_name, told
from fasttrain.data.file_names import is_left_behind
from fasttrain.data.nifti import is_nifti

_REPORTS = {"SEG", "RTSTRUCT", "RTDOSE", "RTPLAN", "RTRECORD", "SR", "PR", "KO", "REG", "DOC"}
"""Modalities that are no image of the patient to be segmented."""


@dataclass(frozen=True, eq=False)
class Series:
    """The instances of one series, by the names of their files; all of them lie in `folder`."""

    folder: Path
    instances: tuple[Instance, ...]

    @property
    def first(self) -> Instance:
        return self.instances[0]

    def __str__(self) -> str:
        return f"{told(self.instances)} {self.first.series} in {self.folder}"

    def is_called(self, name: str | int) -> bool:
        """By SeriesInstanceUID, number or description."""
        number = None if self.first.number is None else str(self.first.number)
        wanted = plain_name(str(name))
        return wanted in (self.first.series, number, plain_name(self.first.description))


class Contents:
    """What lies in the folder of a case and below it."""

    def __init__(self, folder: Path, ignore: Sequence[str]) -> None:
        self.folder = folder
        self.nifti: list[Path] = []
        self._ignore = set(ignore)
        self.looked: dict[Path, Folder] = {}
        groups: dict[tuple[Path, str], list[Instance]] = defaultdict(list)
        for place, below, names in os.walk(folder):
            below[:] = sorted(name for name in below if not name.startswith(".") and not is_left_behind(name))
            inside = Path(place)
            self.looked[inside] = look_into(inside)
            visible = (name for name in sorted(names) if not name.startswith(".") and not is_left_behind(name))
            self.nifti += [inside / name for name in visible if is_nifti(Path(name))]
            for instance in self.looked[inside].instances:
                # A mask is a file by itself, whatever series it counts to
                apart = instance.path.name if mask_kind(instance) else ""
                groups[inside, f"{instance.series} {apart}"].append(instance)
        every = [Series(place, tuple(instances)) for (place, _), instances in groups.items()]
        self.images = [one for one in every if one.first.is_image and one.first.modality not in _REPORTS]
        self.masks = [one for one in every if mask_kind(one.first)]

    @property
    def holds_dicom(self) -> bool:
        """Whether any file is DICOM, or is called as if it were."""
        strange = (path for looked in self.looked.values() for path in looked.others)
        return any(looked.instances for looked in self.looked.values()) or any(
            path.suffix.lower() in (".dcm", ".ima") for path in strange
        )

    def strangers(self, folders: Iterable[Path]) -> dict[tuple[Path, str], list[str]]:
        """{(folder, what is wrong): files} of the folders' files that are no DICOM files and not to be passed over."""
        kinds: dict[tuple[Path, str], list[str]] = defaultdict(list)
        for folder in dict.fromkeys(folders):
            for path, why in self.looked[folder].others.items():
                if path.name not in self._ignore:
                    kinds[folder, why].append(path.name)
        return kinds


def structures_of(mask: Instance) -> list[str]:
    """The names of the structures in a mask, in its order; of a SEG those of its segments but for a background's."""
    header = mask.header
    segments = [one for one in header.get("SegmentSequence") or () if one.get("SegmentNumber")]
    names = [str(one.get("SegmentLabel") or "") for one in segments]
    return names + [str(one.get("ROIName") or "") for one in header.get("StructureSetROISequence") or ()]


def drawn_on(mask: Instance) -> set[str]:
    """The series that a mask says it was drawn on; empty where it does not say."""
    found = {str(one.get("SeriesInstanceUID") or "") for one in mask.header.get("ReferencedSeriesSequence") or ()}
    for frame in mask.header.get("ReferencedFrameOfReferenceSequence") or ():
        for study in frame.get("RTReferencedStudySequence") or ():
            found |= {str(one.get("SeriesInstanceUID") or "") for one in study.get("RTReferencedSeriesSequence") or ()}
    return found - {""}


def mask_kind(instance: Instance) -> str | None:
    """`seg` or `rtstruct`; None for what is no mask."""
    if instance.sop_class in SEG_CLASSES:
        return "seg"
    return "rtstruct" if instance.sop_class == RTSTRUCT_CLASS else None
