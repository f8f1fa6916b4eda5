"""Owns the patients of OpenKBP: their files, the grid they lie on, and one patient as CT, dose and a bit a structure.

Babier et al., "OpenKBP: The open-access knowledge-based planning grand challenge and dataset", Med Phys 48:5549 (2021). A patient
is a folder of sparse CSV files, or the one compressed file that `fasttrain data import openkbp` makes of it.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.data.file_names import as_text
from fasttrain.data.sparse_csv import are_sides, read_numbers, read_sparse
from fasttrain.errors import DataError
from fasttrain.recipe.task import OPENKBP_STRUCTURES
from fasttrain.samples import Case
from fasttrain.whole_files import write_whole

GRID = (128, 128, 128)
VOXELS = 128**3
STRUCTURES = OPENKBP_STRUCTURES
CT, DOSE, MASK, SPACING = "ct.csv", "dose.csv", "possible_dose_mask.csv", "voxel_dimensions.csv"
COMPACT = ".npz"
_FORMAT = 1
_MOST_BYTES = 64 * VOXELS
"""Of an array in a compact file: more is no volume, but an archive that is meant to fill the memory."""


@dataclass(frozen=True, eq=False)
class Patient:
    """ct: float32 [128, 128, 128]; dose: float32 Gy of the same shape, None where there is none; structures: int16, bit n is
    set inside structure n of those asked for, and the bit after the last inside the possible dose mask; spacing: mm.
    """

    ct: np.ndarray
    dose: np.ndarray | None
    structures: np.ndarray
    spacing: tuple[float, ...]


def affine_of(spacing: Sequence[float]) -> np.ndarray:
    """From voxel (i, j, k) to RAS mm, the first voxel at the origin: i runs to the back, j to the left, k to the feet.

    The files do not say so; it is where jaw, cord, brainstem and the two parotids lie in them.
    """
    affine = np.zeros((4, 4))
    affine[1, 0], affine[0, 1], affine[2, 2] = (-float(length) for length in spacing)
    affine[3, 3] = 1.0
    return affine


def csv_case(folder: Path) -> Case:
    """The files of a patient's folder that there are; structures without one are absent. `label` is None where there is no
    dose.
    """
    present = [folder / f"{name}.csv" for name in STRUCTURES]
    files = [path for path in (folder / CT, *present, folder / MASK, folder / SPACING) if is_named(path)]
    dose = folder / DOSE
    return Case(as_text(folder.name), tuple(files or [folder / CT]), dose if is_named(dose) else None)


def is_named(path: Path) -> bool:
    """Whether a folder has an entry of that name: a link that leads nowhere is a file that is lost, not one left out."""
    return path.exists() or path.is_symlink()


def unknown_files(folder: Path) -> list[str]:
    """Names of CSV files in a patient's folder that are none of OpenKBP's, sorted: what they hold is not seen."""
    known = {CT, DOSE, MASK, SPACING, *(f"{name}.csv" for name in STRUCTURES)}
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    return [one for one in names if one.lower().endswith(".csv") and one not in known and not one.startswith(".")]


def is_compact(case: Case) -> bool:
    """Whether a case is one compressed file."""
    return len(case.images) == 1 and case.images[0].suffix == COMPACT


def read_patient(case: Case, names: Sequence[str]) -> Patient:
    """Reads every file of a patient before anything is raised, so that one DataError has every fault.

    names: the structures of bit 0, 1 …; one that the patient lacks is set nowhere.
    """
    if is_compact(case):
        return _compact_patient(case.images[0], names)
    faults: list[str] = []
    structures = np.zeros(VOXELS, dtype=np.int16)
    ct = dose = None
    spacing: tuple[float, ...] = ()
    for path in (*case.images, *([case.label] if case.label is not None else [])):
        try:
            if path.name == SPACING:
                spacing = read_numbers(path, 3)
            elif path.name == CT:
                ct = read_sparse(path, VOXELS).dense(GRID)
            elif path.name == DOSE:
                dose = read_sparse(path, VOXELS).dense(GRID)
            elif path.name == MASK:
                structures[read_sparse(path, VOXELS, mask=True).indices] |= 1 << len(names)
            else:
                inside = read_sparse(path, VOXELS, mask=True).indices
                if path.stem in names:
                    structures[inside] |= 1 << names.index(path.stem)
        except DataError as error:
            faults.extend(error.faults)
    if faults or ct is None:
        raise DataError(faults or [f"case {case.name} has no {CT}"])
    return Patient(ct, dose, structures.reshape(GRID), spacing)


def read_spacing(case: Case) -> tuple[float, ...]:
    """mm along each axis, of a patient of whose files nothing else is read."""
    if is_compact(case):
        return tuple(float(one) for one in _arrays(case.images[0], ("spacing",))["spacing"])
    return read_numbers(next(path for path in case.images if path.name == SPACING), 3)


def write_compact(path: Path, patient: Patient) -> int:
    """Writes a patient, whose bits are those of `STRUCTURES`, as a NumPy archive without pickled parts; gives its bytes.

    Nothing is lost: CT of whole numbers as uint16 and dose of thousandths of a Gy as int32, where they are such, else float32.
    """
    arrays = {
        "format": np.array(_FORMAT),
        "spacing": np.array(patient.spacing, dtype=np.float64),
        "ct": _narrow(patient.ct, 1, np.uint16),
        "structures": patient.structures.astype(np.uint16),
    }
    if patient.dose is not None:
        arrays["dose"] = _narrow(patient.dose, 1000, np.int32)
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    with write_whole(path) as file:
        file.write(stream.getbuffer())
    return stream.tell()


def _narrow(volume: np.ndarray, scale: int, dtype: type[np.integer]) -> np.ndarray:
    whole = np.rint(volume.astype(np.float64) * scale)
    bounds = np.iinfo(dtype)
    if whole.min() < bounds.min or whole.max() > bounds.max:
        return volume
    narrow = whole.astype(dtype)
    return narrow if np.array_equal((narrow / scale).astype(np.float32), volume) else volume


def _compact_patient(path: Path, names: Sequence[str]) -> Patient:
    arrays = _arrays(path, ("ct", "structures", "spacing"), ("dose",))
    stored = arrays["structures"]
    order = [STRUCTURES.index(name) if name in STRUCTURES else None for name in names]
    if order == list(range(len(STRUCTURES))):
        structures = stored.astype(np.int16)
    else:
        structures = np.zeros(GRID, dtype=np.int16)
        for bit, place in enumerate([*order, len(STRUCTURES)]):
            if place is not None:
                structures |= ((stored >> place) & 1).astype(np.int16) << bit
    dose = _wide(arrays["dose"], 1000) if "dose" in arrays else None
    return Patient(_wide(arrays["ct"], 1), dose, structures, tuple(float(one) for one in arrays["spacing"]))


def _wide(stored: np.ndarray, scale: int) -> np.ndarray:
    return (stored / scale if scale > 1 and stored.dtype.kind == "i" else stored).astype(np.float32)


def _arrays(path: Path, needed: Sequence[str], more: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of a compact file by name; whatever is wrong with it is one DataError. Their checksums are looked at."""
    remedy = "make it anew with `fasttrain data import openkbp`"
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty (0 bytes); {remedy}")
        with zipfile.ZipFile(path) as archive:
            if any(member.file_size > _MOST_BYTES for member in archive.infolist()):
                raise DataError(f"{path} is no patient: it unpacks to more than a volume; {remedy}")
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in (*needed, *more) if name in found.files}
            number = int(found["format"]) if "format" in found.files else None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path} is damaged or no compact patient ({_first_line(error)}); {remedy}") from error
    lacking = [name for name in needed if name not in arrays]
    if number != _FORMAT or lacking:
        found_text = f"no {', '.join(lacking)}" if lacking else f"format {number}"
        raise DataError(f"{path} is no compact patient of format {_FORMAT} (it has {found_text}); {remedy}")
    shapes = {name: (3,) if name == "spacing" else GRID for name in arrays}
    wrong = [name for name, one in arrays.items() if one.shape != shapes[name] or one.dtype.kind not in "iuf"]
    if not wrong and not are_sides(arrays["spacing"].tolist()):
        wrong = ["spacing"]
    if wrong:
        raise DataError(
            f"{path} is no compact patient: {', '.join(wrong)} has not the shape or values expected; {remedy}"
        )
    return arrays


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
