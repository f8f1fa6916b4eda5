"""Owns the check of OpenKBP patients: the facts of one file, CSV or compact, and what is wrong with a patient as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fasttrain.data.checking.facts import ChannelFacts, FileFacts
from fasttrain.data.checking.judging import CaseFindings, Terms
from fasttrain.data.checking.voxels import faults_of_voxels
from fasttrain.data.openkbp import (
    COMPACT,
    CT,
    DOSE,
    GRID,
    MASK,
    SPACING,
    STRUCTURES,
    VOXELS,
    affine_of,
    is_compact,
    read_patient,
)
from fasttrain.data.sparse_csv import read_numbers, read_sparse
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import Case, Grid

SUFFIXES = (".csv", COMPACT)
_MASK_VALUE = len(STRUCTURES) + 1
"""Structures are counted in `FileFacts.values` by their place from 1 on, the possible dose mask after the last."""


def patient_facts(path: Path) -> FileFacts:
    """The facts of a file of a patient; one that cannot be read gives facts with its faults.

    Of a volume or mask its channels and the voxels of its structure; of the voxel's sides the affine. A compact file has all.
    """
    try:
        return _compact_facts(path) if path.suffix == COMPACT else _csv_facts(path)
    except DataError as error:
        return FileFacts(faults=error.faults)


def _csv_facts(path: Path) -> FileFacts:
    if path.name == SPACING:
        spacing = read_numbers(path, 3)
        return replace(_facts((), affine_of(spacing)), shape=(3,), digest=_digest([np.array(spacing)]))
    mask = path.name not in (CT, DOSE)
    found = read_sparse(path, VOXELS, mask)
    if mask:
        value = _MASK_VALUE if path.name == MASK else 1
        return replace(
            _facts((), np.eye(4)), values=((value, len(found.indices)),), digest=_digest([np.sort(found.indices)])
        )
    volume = found.dense(GRID)
    return replace(_facts((volume,), np.eye(4)), digest=_digest([volume]))


def _compact_facts(path: Path) -> FileFacts:
    patient = read_patient(Case(path.stem, (path,), path), STRUCTURES)
    counts = [int(np.count_nonzero((patient.structures >> bit) & 1)) for bit in range(_MASK_VALUE)]
    volumes = [patient.ct] if patient.dose is None else [patient.ct, patient.dose]
    return replace(
        _facts(volumes, affine_of(patient.spacing)),
        values=tuple(enumerate(counts, start=1)),
        digest=_digest([*volumes, patient.structures, np.array(patient.spacing)]),
    )


def _facts(volumes: Sequence[np.ndarray], affine: np.ndarray) -> FileFacts:
    return FileFacts(
        shape=GRID,
        affine=tuple(float(one) for one in affine.reshape(-1)),
        dtype="float32",
        channels=tuple(ChannelFacts(float(volume.min()), float(volume.max())) for volume in volumes),
    )


def _digest(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def judge_patient(
    case: Case, images: Sequence[FileFacts], label: FileFacts | None, terms: Terms, pairing: Sequence[str] = ()
) -> CaseFindings:
    """As `judge`, of an OpenKBP patient: `voxels` are those of each structure, and at 0 the rest."""
    faults = list(pairing)
    if faults:
        faults.extend(fault for facts in (*images, *([label] if label is not None else [])) for fault in facts.faults)
    grid, voxels = (None, None) if faults else _judge_files(case, images, label, terms.data, faults)
    channels = images[0].channels[:1] if images else ()
    ranges = tuple(
        (one.minimum, one.maximum) for one in channels if one.minimum is not None and one.maximum is not None
    )
    return CaseFindings(
        case=case,
        grid=grid,
        label_shape=None if grid is None else grid.shape,
        dtypes=("float32",) if images and images[0].decoded else (),
        label_dtype=None,
        minimum=ranges[0][0] if ranges else None,
        maximum=ranges[0][1] if ranges else None,
        voxels=voxels,
        digests=tuple(facts.digest for facts in images) if grid is not None else (),
        label_digest=label.digest if label is not None and label.digest else None,
        ranges=ranges,
        ignored=None,
        undeclared=None if voxels is None else {},
        faults=tuple(dict.fromkeys(faults)),
        warnings=(),
    )


def _judge_files(
    case: Case, images: Sequence[FileFacts], label: FileFacts | None, data: DataSpec, faults: list[str]
) -> tuple[Grid | None, dict[int, int] | None]:
    """Adds what is wrong with a patient to `faults`; gives its grid and the voxels of each class, the mask's at 0, as far as
    known.
    """
    files = dict(zip(case.images, images, strict=True))
    if case.label is not None and label is not None:
        files[case.label] = label
    for facts in files.values():
        faults.extend(facts.faults)
    if not all(facts.decoded for facts in files.values()):
        return None, None
    whole = is_compact(case)
    by_name = {path.name: facts for path, facts in files.items()}
    first = files[case.images[0]]
    ct = replace(first, channels=first.channels[:1])
    faults.extend(faults_of_voxels(case.images[0], data.channels, ct, data))
    dose = (first.channels[1:] if whole else by_name[DOSE].channels) if whole or DOSE in by_name else ()
    if not dose and case.label is not None:
        faults.append(f"{case.images[0]}: patient {case.name} has no dose; get the patient anew, or leave it out")
    for channel in dose:
        low, high = channel.minimum, channel.maximum
        assert low is not None
        if low < 0 or not high:
            told = f"a dose of {low:g} Gy" if low < 0 else "no dose above 0"
            faults.append(f"{case.label}: patient {case.name} has {told}; get the patient anew, or leave it out")
    counts = _counts(case, files)
    if not counts.get(MASK.removesuffix(".csv")):
        path = case.images[0] if whole else case.images[0].parent / MASK
        faults.append(
            f"{path}: patient {case.name} has no voxel in its possible dose mask, so that nothing could be learnt"
        )
    voxels = {value: counts.get(name, 0) for value, name in data.classes.items()}
    grid = Grid(GRID, first.matrix if whole else by_name[SPACING].matrix)
    return grid, {0: VOXELS - sum(voxels.values()), **dict(sorted(voxels.items()))}


def _counts(case: Case, files: dict[Path, FileFacts]) -> dict[str, int]:
    """Voxels by the name of a structure, and of the mask."""
    if is_compact(case):
        names = (*STRUCTURES, MASK.removesuffix(".csv"))
        return {names[place - 1]: count for place, count in files[case.images[0]].values or ()}
    return {path.stem: facts.values[0][1] for path, facts in files.items() if facts.values}
