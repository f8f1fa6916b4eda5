"""Owns which reader a file of voxels has, and which files its voxels depend on: NIfTI by its ending, or DICOM.

A DICOM file stands for all of its series in its folder. Only cases of `data.source.kind: dicom` have any.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from fasttrain.data import nifti
from fasttrain.data.nifti import NiftiFile, NiftiHeader, is_nifti
from fasttrain.data.seen_files import SEEN, Key, key_of_all
from fasttrain.errors import DataError
from fasttrain.samples import Case, Drawn

_WIDEST_KEPT = 4
"""Bytes a voxel of volumes that are kept for a second reader, as of NIfTI files."""


def read_file(path: Path, drawn: Drawn | None = None) -> NiftiFile:
    """The whole volume. Raises DataError with one sentence a fault, MachineError where a package for DICOM is missing."""
    if not _is_dicom(path):
        return nifti.read_file(path)
    key = _key(path, drawn)
    kept: NiftiFile | None = SEEN.take(key)
    if kept is not None:
        return kept
    file = _read_dicom(path, drawn)
    SEEN.note_header(key, file.header)
    if file.header.dtype.itemsize <= _WIDEST_KEPT:
        SEEN.note_file(key, file, file.raw.nbytes)
    return file


def read_header(path: Path, drawn: Drawn | None = None) -> NiftiHeader:
    """Grid and type alone; the voxels may still be damaged. Raises as `read_file`."""
    if not _is_dicom(path):
        return nifti.read_header(path)
    key = _key(path, drawn)
    known: NiftiHeader | None = SEEN.header(key)
    if known is None:
        from fasttrain.data.dicom.pixels import read_series_header

        known = read_series_header(path) if drawn is None else _read_dicom(path, drawn).header
        SEEN.note_header(key, known)
    return known


def files_of(path: Path, drawn: Drawn | None = None) -> tuple[Path, ...]:
    """Every file that the voxels depend on, sorted; for DICOM all files of the folder, since one that is added may be a slice."""
    if not _is_dicom(path):
        return (path,)
    from fasttrain.data.dicom.instances import stamp_of

    folders = {path.parent, *([drawn.image.parent] if drawn is not None else [])}
    return tuple(sorted(folder / name for folder in folders for name, *_ in stamp_of(folder)))


def files_of_case(case: Case) -> tuple[Path, ...]:
    """Every file that the volume of a case depends on, its label's last."""
    images = [file for path in case.images for file in files_of(path)]
    return (*images, *(files_of(case.label, case.drawn) if case.label is not None else ()))


def dicom_versions() -> dict[str, str | None]:
    """What is installed of the packages that decide how DICOM is read; None for what is not."""
    from fasttrain.data.dicom.library import PACKAGES

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _is_dicom(path: Path) -> bool:
    if is_nifti(path):
        return False
    from fasttrain.data.dicom.instances import is_dicom

    return is_dicom(path)


def _key(path: Path, drawn: Drawn | None) -> Key | None:
    return key_of_all(f"{path} {drawn}", files_of(path, drawn))


def _read_dicom(path: Path, drawn: Drawn | None) -> NiftiFile:
    if drawn is None:
        from fasttrain.data.dicom.pixels import read_series

        return read_series(path)
    from fasttrain.data.dicom.instances import RTSTRUCT_CLASS, SEG_CLASSES, instance_of
    from fasttrain.data.dicom.segmentation import read_segmentation
    from fasttrain.data.dicom.structure_set import read_structure_set

    sop_class = instance_of(path).sop_class
    if sop_class in SEG_CLASSES:
        return read_segmentation(path, drawn)
    if sop_class == RTSTRUCT_CLASS:
        return read_structure_set(path, drawn)
    raise DataError(f"{path} is neither a DICOM segmentation (SEG) nor a structure set (RTSTRUCT)")
