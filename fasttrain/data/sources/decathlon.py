"""Owns the Medical Segmentation Decathlon layout: a `dataset.json` that lists image and label of each case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.dataset_json import read_dataset_json, warn_of_labels
from fasttrain.data.sources.found import FoundCases, describe_files, listed
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, DecathlonSource
from fasttrain.samples import Case


def find_decathlon(spec: DataSpec, root: Path) -> FoundCases:
    """The `training` entries; paths are relative to the JSON file. `test` entries carry no label and are left out.

    Raises one DataError with every entry that is malformed, lacks a file, or pairs an image with another image's label.
    """
    source = spec.source
    return read_decathlon(spec, root / (source.file if isinstance(source, DecathlonSource) else "dataset.json"))


def read_decathlon(spec: DataSpec, path: Path) -> FoundCases:
    """The cases that the given `dataset.json` lists; see `find_decathlon`."""
    document = read_dataset_json(path)
    entries = document.get("training")
    if not isinstance(entries, list):
        keys = listed(map(str, document)) or "no keys"
        raise DataError(f"{path}: 'training' should be a list of {{image, label}} entries; found {keys}")
    if not entries:
        raise DataError(
            f"{path} fits no case: looked for entries under 'training', found an empty list beside "
            f"{describe_files(path.parent)}"
        )
    faults: list[str] = []
    cases = [case for number, entry in enumerate(entries) if (case := _case_of(path, number, entry, faults))]
    faults.extend(_faults_between(path, cases))
    if faults:
        raise DataError(faults)
    warnings = [
        *_warn_of_count(path, document, len(cases)),
        *warn_of_labels(path, document, spec),
        *_warn_of_unlisted(cases),
    ]
    return FoundCases(tuple(sorted(cases, key=lambda case: case.name)), tuple(warnings))


def _case_of(path: Path, number: int, entry: Any, faults: list[str]) -> Case | None:
    where = f"{path}: training[{number}]"
    if not isinstance(entry, dict):
        faults.append(f"{where} is {entry!r:.80}; an object with 'image' and 'label' is expected")
        return None
    images = entry.get("image")
    images = [images] if isinstance(images, str) else images
    label = entry.get("label")
    before = len(faults)
    if not images or not isinstance(images, list) or not all(isinstance(one, str) and one for one in images):
        has = f"the label {label} has no image" if isinstance(label, str) else "there is no image"
        faults.append(f"{where}: {has}; give 'image' a path or a list of paths")
    if not isinstance(label, str) or not label:
        has = f"the image {images[0]} has no label" if isinstance(images, list) and images else "there is no label"
        faults.append(f"{where}: {has}; give 'label' a path")
    if len(faults) > before or not isinstance(label, str) or not isinstance(images, list):
        return None
    files = [path.parent / one for one in images]
    for kind, file in (*(("image", file) for file in files), ("label", path.parent / label)):
        if not file.is_file():
            found = "is a folder" if file.is_dir() else "does not exist"
            faults.append(f"{where}: the {kind} {file} {found}; put the file there or take the entry out")
    return Case(case_id(files[0]), tuple(files), path.parent / label)


def _faults_between(path: Path, cases: list[Case]) -> list[str]:
    faults = [
        f"{path} lists case {name} {count} times; each case is listed once"
        for name, count in Counter(case.name for case in cases).items()
        if count > 1
    ]
    names = {case.name for case in cases}
    for case in cases:
        label = case_id(case.label) if case.label else case.name
        # A label may be called otherwise than its image, but not after another image: that is a list out of step.
        if label != case.name and label in names:
            faults.append(
                f"{path} pairs the image of case {case.name} with the label of case {label}; pair each with its own"
            )
    return faults


def _warn_of_count(path: Path, document: dict[str, Any], found: int) -> list[str]:
    announced = document.get("numTraining")
    if announced is None or announced == found:
        return []
    return [f"{path} says numTraining is {announced}, but lists {found} cases; all {found} are used"]


def _warn_of_unlisted(cases: list[Case]) -> list[str]:
    used = {path.resolve() for case in cases for path in (*case.images, case.label) if path is not None}
    warnings = []
    for folder in sorted({case.images[0].parent for case in cases}):
        extra = [
            path.name
            for path in sorted(folder.iterdir())
            if is_nifti(path) and not path.name.startswith(".") and path.resolve() not in used
        ]
        if extra:
            warnings.append(
                f"{folder} holds {len(extra)} files that dataset.json does not list ({listed(extra)}); not used"
            )
    return warnings
