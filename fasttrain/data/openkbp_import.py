"""Owns making OpenKBP's CSV files into one compact file a patient, each of them whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.data.openkbp import (
    COMPACT,
    STRUCTURES,
    VOXELS,
    Patient,
    csv_case,
    is_compact,
    read_patient,
    write_compact,
)
from fasttrain.data.sources.found import listed
from fasttrain.data.sources.openkbp import every_patient, missing_files
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.samples import Case
from fasttrain.wording import counted

_Stamp = frozenset[tuple[Path, int, int]]

VOXEL_BYTES = 6
"""As a patient is kept for training with 16-bit images: CT, dose, and a bit a structure."""


@dataclass(frozen=True)
class Imported:
    """What lies in the target now: files that were written and those that were there. csv_bytes: of the files they are made of;
    volume_bytes: what all of them take in memory.
    """

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    csv_bytes: int
    compact_bytes: int
    volume_bytes: int


def import_openkbp(
    source: Path,
    target: Path,
    overwrite: bool = False,
    told: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Imported:
    """Writes each patient of `source` to the same place under `target`; one without a dose (of a test set) has none there.

    A file that is there already is kept where it holds what the source holds. Raises one DataError with the faults of all
    patients once the sound ones are written, among them patients whose files changed meanwhile, of which none is left, and files
    that hold something else than the source; RecipeError where `target` is in `source`; StorageError where one cannot be
    written, at once.
    """
    if not source.is_dir():
        raise DataError(f"{source} {'is a file' if source.exists() else 'does not exist'}; name the folder of the set")
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise RecipeError(
            f"{target} lies in {source}, where its files would be taken for patients; name another folder"
        )
    cases = every_patient(source)
    places = {case.name: _place(case, source, target) for case in cases}
    for folder in {path.parent for path in places.values()}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    written: dict[str, Path] = {}
    kept: list[Path] = []
    faults: list[str] = []
    stamps: dict[str, _Stamp] = {}
    for done, case in enumerate(cases, start=1):
        stamps[case.name] = _stamp(case)
        try:
            if _bring(case, places[case.name], overwrite):
                written[case.name] = places[case.name]
            else:
                kept.append(places[case.name])
        except DataError as error:
            faults.extend(error.faults)
        except StorageError as error:
            raise StorageError(_cut_short(error, len(written), len(cases))) from error
        told(done, len(cases), case.name)
    faults += _changed_meanwhile(source, cases, stamps, written)
    if faults:
        raise DataError(faults)
    compact = sum(os.path.getsize(path) for path in (*written.values(), *kept))
    csv = sum(size for stamp in stamps.values() for _, size, _ in stamp)
    return Imported(tuple(written.values()), tuple(kept), csv, compact, VOXELS * VOXEL_BYTES * len(cases))


def _bring(case: Case, path: Path, overwrite: bool) -> bool:
    """Whether the patient was written; not where its file holds the same already. Raises DataError where it holds another."""
    if (fault := missing_files(case)) is not None:
        raise DataError(fault)
    patient = read_patient(case, STRUCTURES)
    if path.exists() and not overwrite:
        try:
            there = read_patient(Case(case.name, (path,), path), STRUCTURES)
        except DataError as error:
            raise DataError([f"{fault} and --overwrite" for fault in error.faults]) from error
        if not _same(there, patient):
            raise DataError(
                f"{path} is there already and is not what {_place_of(case)} holds now; write it anew with --overwrite, or name "
                "another folder"
            )
        return False
    write_compact(path, patient)
    return True


def _same(one: Patient, other: Patient) -> bool:
    if (one.dose is None) != (other.dose is None) or one.spacing != other.spacing:
        return False
    pairs = [(one.ct, other.ct), (one.structures, other.structures)]
    if one.dose is not None and other.dose is not None:
        pairs.append((one.dose, other.dose))
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _place_of(case: Case) -> Path:
    return case.images[0] if is_compact(case) else case.images[0].parent


def _stamp(case: Case) -> _Stamp:
    """Path, size and time of change of each file that the patient has now."""
    now = case if is_compact(case) else csv_case(case.images[0].parent)
    found = []
    for path in {*now.images, *([now.label] if now.label is not None else [])}:
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((path, seen.st_size, seen.st_mtime_ns))
    return frozenset(found)


def _changed_meanwhile(
    source: Path, cases: Sequence[Case], stamps: Mapping[str, _Stamp], written: dict[str, Path]
) -> list[str]:
    """Faults of patients whose files are no longer what they were when they were read, as while a set is still being copied.

    What was made of them is removed, for it may be half a patient, and taken out of `written`.
    """
    faults = []
    for case in cases:
        if _stamp(case) != stamps[case.name]:
            if (path := written.pop(case.name, None)) is not None:
                path.unlink(missing_ok=True)
            faults.append(
                f"{_place_of(case)} changed while the set was imported; give the command again once it is complete"
            )
    try:
        later = {case.name for case in every_patient(source)} - set(stamps)
    except DataError as error:
        return [*faults, *error.faults]
    if later:
        faults.append(
            f"{source} got {counted(len(later), 'more patient')} while it was imported ({listed(sorted(later))}); give the "
            "command again once it is complete"
        )
    return faults


def _cut_short(error: StorageError, written: int, total: int) -> str:
    done = (
        f"the {counted(written, 'patient')} of {total} written before are whole and stay"
        if written
        else "none was written"
    )
    return f"{error}; {done}: make room, or name another folder, and give the command again"


def _place(case: Case, source: Path, target: Path) -> Path:
    folder = case.images[0].parent if is_compact(case) else case.images[0].parent.parent
    return target / folder.relative_to(source) / f"{case.name}{COMPACT}"
