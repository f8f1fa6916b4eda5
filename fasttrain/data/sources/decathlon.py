"""Owns the Medical Segmentation Decathlon layout: a `dataset.json` that lists image and label of each case."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from fasttrain.data.file_names import FileFinder, is_left_behind
from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.dataset_json import read_dataset_json, warn_of_count, warn_of_labels
from fasttrain.data.sources.found import FoundCases, describe_files, left_behind, listed, warn_of_left_behind
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, DecathlonSource
from fasttrain.samples import Case
from fasttrain.wording import counted


def find_decathlon(spec: DataSpec, root: Path) -> FoundCases:
    """The `training` entries; paths are relative to the JSON file. `test` entries carry no label and are left out.

    Raises one DataError with every entry that is malformed, lacks a file, or pairs an image with another image's label.
    """
    source = spec.source
    return read_decathlon(spec, root / (source.file if isinstance(source, DecathlonSource) else "dataset.json"))


def read_decathlon(spec: DataSpec, path: Path) -> FoundCases:
    """The cases that the given `dataset.json` lists; see `find_decathlon`."""
    document = read_dataset_json(path)
    entries = _entries_of(path, document)
    faults: list[str] = []
    cases: list[Case] = []
    ignored: list[Path] = []
    finder = FileFinder(path.parent)
    for number, entry in enumerate(entries):
        images = _images_of(entry)
        if images and all(map(_is_left_behind, images)):
            ignored.extend(finder.find(one) for one in images)
        elif (case := _case_of(path, number, entry, finder, faults)) is not None:
            cases.append(case)
    faults.extend(_faults_between(path, cases))
    if not cases and not faults:
        raise DataError(f"{path} fits no case: all it lists under 'training' are files that macOS left behind")
    if faults:
        raise DataError(faults)
    folders = {file.parent for case in cases for file in (*case.images, case.label) if file is not None}
    warnings = [
        *warn_of_count(path, document, len(cases), len(entries)),
        *warn_of_labels(path, document, spec),
        *_warn_of_unlisted(cases),
        *warn_of_left_behind(path.parent, {*left_behind((path.parent, *folders)), *ignored}),
    ]
    return FoundCases(tuple(sorted(cases, key=lambda case: case.name)), tuple(warnings))


def _entries_of(path: Path, document: dict[str, Any]) -> list[Any]:
    entries = document.get("training")
    if isinstance(entries, dict):
        found = "one entry that is in no list" if {"image", "label"} & entries.keys() else "an object"
        raise DataError(f"{path}: 'training' should be a list of {{image, label}} entries, [ … ]; found {found}")
    if not isinstance(entries, list):
        keys = listed(map(str, document)) or "no keys" if "training" not in document else f"{entries!r:.80}"
        nnunet = "; an nnU-Net folder is read with data.source.kind: nnunet" if "file_ending" in document else ""
        raise DataError(f"{path}: 'training' should be a list of {{image, label}} entries; found {keys}{nnunet}")
    if not entries:
        raise DataError(
            f"{path} fits no case: looked for entries under 'training', found an empty list beside "
            f"{describe_files(path.parent)}"
        )
    return entries


def _images_of(entry: Any) -> list[str]:
    """The image paths of a well-formed entry, else []."""
    images = entry.get("image") if isinstance(entry, dict) else None
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(one, str) and one for one in images):
        return []
    return images


def _is_left_behind(written: str) -> bool:
    return is_left_behind(written.replace("\\", "/").rsplit("/", 1)[-1])


def _case_of(path: Path, number: int, entry: Any, finder: FileFinder, faults: list[str]) -> Case | None:
    where = f"{path}: training[{number}]"
    if not isinstance(entry, dict):
        faults.append(f"{where} is {entry!r:.80}; an object with 'image' and 'label' is expected")
        return None
    images, label = _images_of(entry), entry.get("label")
    before = len(faults)
    if not images:
        has = f"the label {label} has no image" if isinstance(label, str) else "there is no image"
        faults.append(f"{where}: {has}; give 'image' a path or a list of paths")
    if not isinstance(label, str) or not label:
        has = f"the image {images[0]} has no label" if images else "there is no label"
        faults.append(f"{where}: {has}; give 'label' a path")
    if len(faults) > before or not isinstance(label, str):
        return None
    files = [finder.find(one) for one in images]
    label_file = finder.find(label)
    for kind, file in (*(("image", file) for file in files), ("label", label_file)):
        # os.path never raises, whatever the document has for a path
        if is_left_behind(file.name):
            faults.append(
                f"{where}: the {kind} {file} is what macOS left beside a file; name the {kind} or take the entry out"
            )
        elif not os.path.isfile(file):
            found = "is a folder" if os.path.isdir(file) else "does not exist"
            faults.append(f"{where}: the {kind} {file} {found}; put the file there or take the entry out")
    return Case(case_id(files[0]), tuple(files), label_file)


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
                f"{folder} holds {counted(len(extra), 'file')} that dataset.json does not list ({listed(extra)}); not used"
            )
    return warnings
