"""Owns the layout of OpenKBP: folders of CSV files or compact files, a patient each, in the parts that the set comes in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.openkbp import (
    COMPACT,
    CT,
    DOSE,
    MASK,
    SPACING,
    STRUCTURES,
    csv_case,
    is_compact,
    is_named,
    unknown_files,
)
from fasttrain.data.sources.found import FoundCases, describe_files, listed
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.names import did_you_mean
from fasttrain.samples import Case
from fasttrain.wording import counted

NEEDED = (DOSE, CT, MASK, SPACING)
_ANY = {*NEEDED, *(f"{name}.csv" for name in STRUCTURES)}


def find_openkbp(spec: DataSpec, root: Path) -> FoundCases:
    """The patients in `root` and in the folders in it (`train-pats` and the like), by name.

    One that lacks a file other than a structure's is incomplete. Raises DataError where there is no patient, or one name twice.
    """
    cases: list[Case] = []
    faults: dict[str, tuple[str, ...]] = {}
    for case in every_patient(root):
        if (fault := _without_a_file(case)) is not None:
            faults[case.name] = (fault,)
        cases.append(case)
    incomplete = tuple(case for case in cases if case.name in faults)
    whole = tuple(case for case in cases if case.name not in faults)
    if not whole:
        raise DataError(fault for name in faults for fault in faults[name])
    return FoundCases(whole, _warnings(cases), incomplete, faults)


def _warnings(cases: Sequence[Case]) -> tuple[str, ...]:
    """A sentence for each name of a file that is none of a patient's: a structure misspelt would be taken for absent."""
    found: dict[str, list[Path]] = {}
    for case in cases:
        folder = case.images[0].parent
        for name in [] if is_compact(case) else unknown_files(folder):
            found.setdefault(name, []).append(folder)
    return tuple(
        f"{folders[0] / name} is no file of an OpenKBP patient{did_you_mean(name, sorted(_ANY))}; it is not read"
        + (f" (nor in {counted(len(folders) - 1, 'more patient')})" if len(folders) > 1 else "")
        for name, folders in sorted(found.items())
    )


def every_patient(root: Path) -> tuple[Case, ...]:
    """The patients under `root` sorted by name, complete or not. Raises DataError where there is none or one name twice."""
    cases = sorted(_patients_in(root), key=lambda case: case.name)
    if not cases:
        raise DataError(
            f"{root} holds no OpenKBP patient: looked for pt_1/{CT} or pt_1{COMPACT}, here or one folder down, found "
            f"{describe_files(root)}"
        )
    twice = [(one, other) for one, other in itertools.pairwise(cases) if one.name == other.name]
    if twice:
        raise DataError(
            f"patient {one.name} is there twice, {one.images[0]} and {other.images[0]}; keep one of the two"
            for one, other in twice
        )
    return tuple(cases)


def looks_like_openkbp(root: Path) -> bool:
    """Whether there is a patient under `root`, of whom at least one file has a name that only OpenKBP gives."""
    try:
        return any(not is_compact(case) or case.name.startswith("pt_") for case in _patients_in(root))
    except DataError:
        return False


def patient_at(path: Path) -> Case | None:
    """The patient that a folder or file is; None where it is none."""
    if path.is_dir():
        return csv_case(path) if any(is_named(path / name) for name in _ANY) else None
    if path.suffix == COMPACT and path.is_file():
        return Case(as_text(path.stem), (path,), path)
    return None


def _patients_in(root: Path, deeper: int = 2) -> Iterator[Case]:
    """Those in `root`, and in folders in it that are no patients themselves."""
    for path in _entries(root):
        case = patient_at(path)
        if case is not None:
            yield case
        elif deeper and path.is_dir():
            yield from _patients_in(path, deeper - 1)


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return sorted(
            path for path in folder.iterdir() if not path.name.startswith(".") and not is_left_behind(path.name)
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror or error}") from error


def missing_files(case: Case, needed: Sequence[str] = NEEDED[1:]) -> str | None:
    """The sentence on files that a patient in CSV lacks and cannot be without; by default all but the dose. None where it has
    all.
    """
    if case.images[0].suffix == COMPACT:
        return None
    folder = case.images[0].parent
    lacking = [name for name in needed if not is_named(folder / name)]
    return (
        f"{folder}: patient {case.name} lacks {listed(lacking)}; get the patient anew or remove the folder"
        if lacking
        else None
    )


def _without_a_file(case: Case) -> str | None:
    return missing_files(case, NEEDED)
