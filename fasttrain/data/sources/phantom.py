"""Owns the made data set: its files in the Decathlon layout, written on first use and whole whenever they are listed."""

from __future__ import annotations

import gzip
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.sources.dataset_json import read_dataset_json
from fasttrain.data.sources.decathlon import read_decathlon
from fasttrain.data.sources.found import FoundCases
from fasttrain.errors import DataError, StorageError
from fasttrain.recipe.data_spec import DataSpec, PhantomSource
from fasttrain.whole_files import write_json, write_whole

_VERSION = 1
_FOLDERS = ("imagesTr", "labelsTr")


def find_phantoms(spec: DataSpec, root: Path) -> FoundCases:
    """The first `data.source.cases` phantoms, made where they are missing; see `ensure_phantoms`."""
    source = spec.source
    assert isinstance(source, PhantomSource)
    ensure_phantoms(source, root)
    found = read_decathlon(spec, root / "dataset.json")
    wanted = {_name(number) for number in range(source.cases)}
    return FoundCases(
        tuple(case for case in found.cases if case.name in wanted),
        found.warnings,
        tuple(case for case in found.incomplete if case.name in wanted),
        {name: faults for name, faults in found.faults.items() if name in wanted},
    )


def ensure_phantoms(spec: PhantomSource, root: Path) -> None:
    """Makes the phantoms under `root` that are not there whole; those of a larger set of the same seed are reused.

    The bytes are a function of the seed, each file appears whole, and `dataset.json` comes last, so two processes may make
    the set at once and a broken-off making is completed. Raises DataError where `root` holds something else, and
    StorageError where it cannot be written.
    """
    recorded = _recorded_sizes(spec, root)
    missing = [number for number in range(spec.cases) if not _is_whole(root, number, recorded)]
    if not missing:
        return
    try:
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{root} cannot be made: {error.strerror or error}; choose another folder with --data"
        ) from error
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1, 8)) as pool:
        made = pool.map(lambda number: (_name(number), _write_case(spec.seed, number, root)), missing)
        sizes = {**recorded, **dict(made)}
    write_json(root / "dataset.json", _document(spec, sizes))


def _name(number: int) -> str:
    return f"phantom_{number:03d}"


def _recorded_sizes(spec: PhantomSource, root: Path) -> dict[str, list[int]]:
    """The file sizes by case that an earlier making noted; {} where there was none."""
    path = root / "dataset.json"
    if not path.exists():
        strange = [entry.name for entry in root.iterdir() if entry.name not in _FOLDERS] if root.is_dir() else []
        strange = [name for name in strange if not name.startswith(".")]
        if strange:
            raise DataError(
                f"{root} holds other files ({sorted(strange)[0]}); phantoms need a folder of their own (--data)"
            )
        return {}
    note: Any = read_dataset_json(path).get("phantom")
    if not isinstance(note, dict) or not isinstance(note.get("bytes"), dict):
        raise DataError(f"{path} is of another data set; phantoms need a folder of their own (--data)")
    found, wanted = (note.get("version"), note.get("seed")), (_VERSION, spec.seed)
    if found != wanted:
        raise DataError(
            f"{path} lists phantoms of version {found[0]} and seed {found[1]}, but version {wanted[0]} and seed {wanted[1]} "
            f"are asked for; remove {root} or choose another folder with --data"
        )
    return note["bytes"]


def _is_whole(root: Path, number: int, recorded: dict[str, list[int]]) -> bool:
    try:
        sizes = [(root / folder / f"{_name(number)}.nii.gz").stat().st_size for folder in _FOLDERS]
    except OSError:
        return False
    return sizes == recorded.get(_name(number))


def _write_case(seed: int, number: int, root: Path) -> list[int]:
    # scipy.ndimage takes a third of a second, which no other source should wait for
    from fasttrain.data.sources.phantom_volume import make_phantom

    volume = make_phantom(seed, number)
    sizes = []
    for folder, values in zip(_FOLDERS, (volume.image, volume.label), strict=True):
        blob = gzip.compress(_nifti_bytes(values, volume.affine), compresslevel=1, mtime=0)
        with write_whole(root / folder / f"{_name(number)}.nii.gz") as stream:
            stream.write(blob)
        sizes.append(len(blob))
    return sizes


def _nifti_bytes(values: np.ndarray, affine: np.ndarray) -> bytes:
    import nibabel as nib

    image = nib.Nifti1Image(values, affine, dtype=values.dtype)
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


def _document(spec: PhantomSource, sizes: dict[str, list[int]]) -> dict[str, Any]:
    names = sorted(sizes)
    return {
        "name": "fasttrain phantoms",
        "description": "Made CT-like volumes with a liver and two kidneys; no patient data.",
        "licence": "Apache-2.0",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "liver", "2": "kidney"},
        "numTraining": len(names),
        "training": [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in names],
        "test": [],
        "phantom": {"version": _VERSION, "seed": spec.seed, "bytes": {name: sizes[name] for name in names}},
    }
