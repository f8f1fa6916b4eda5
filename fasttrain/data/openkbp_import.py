"""Owns making OpenKBP's CSV files into one compact file a patient, each of them whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.caches.filling import Gathering
from fasttrain.data.openkbp import COMPACT, STRUCTURES, VOXELS, is_compact, read_patient, write_compact
from fasttrain.data.sources.openkbp import every_patient, missing_files
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.samples import Case

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

    Raises one DataError with the faults of all patients once the sound ones are written, RecipeError where `target` is in
    `source`, StorageError where nothing can be written.
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
    written: list[Path] = []
    kept: list[Path] = []

    def work(case: Case) -> None:
        path = places[case.name]
        if path.exists() and not overwrite:
            read_patient(Case(case.name, (path,), path), STRUCTURES)
            kept.append(path)
            return
        if (fault := missing_files(case)) is not None:
            raise DataError(fault)
        write_compact(path, read_patient(case, STRUCTURES))
        written.append(path)

    gathering = Gathering(work, len(cases), None)
    for done, case in enumerate(cases, start=1):
        gathering(case)
        told(done, len(cases), case.name)
    gathering.raise_faults()
    files = [path for case in cases for path in {*case.images, *([case.label] if case.label is not None else [])}]
    compact = sum(os.path.getsize(path) for path in (*written, *kept))
    volumes = VOXELS * VOXEL_BYTES * len(cases)
    return Imported(tuple(written), tuple(kept), sum(os.path.getsize(path) for path in files), compact, volumes)


def _place(case: Case, source: Path, target: Path) -> Path:
    folder = case.images[0].parent if is_compact(case) else case.images[0].parent.parent
    return target / folder.relative_to(source) / f"{case.name}{COMPACT}"
