"""Owns the Medical Segmentation Decathlon layout: a `dataset.json` that lists image and label of each case."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from fasttrain.data.dicom.instances import is_dicom
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

    An entry that lacks a file or pairs an image with another image's label is an incomplete case. Raises one DataError with every
    entry that names no file, or a case that is listed twice, and where no case is complete.
    """
    source = spec.source
    return read_decathlon(spec, root / (source.file if isinstance(source, DecathlonSource) else "dataset.json"))


def read_decathlon(spec: DataSpec, path: Path) -> FoundCases:
    """The cases that the given `dataset.json` lists; see `find_decathlon`."""
    document = read_dataset_json(path)
    entries = _entries_of(path, document)
    faults: list[str] = []
    by_name: dict[str, list[str]] = {}
    cases: list[Case] = []
    ignored: list[Path] = []
    finder = FileFinder(path.parent)
    for number, entry in enumerate(entries):
        images = _images_of(entry)
        if images and all(map(_is_left_behind, images)):
            ignored.extend(finder.find(one) for one in images)
            continue
        case, wrong = _case_of(path, number, entry, finder)
        if case is None:
            faults.extend(wrong)
            continue
        cases.append(case)
        if wrong:
            by_name.setdefault(case.name, []).extend(wrong)
    faults.extend(_faults_of_repeats(path, cases))
    for name, fault in _faults_of_pairs(path, cases):
        by_name.setdefault(name, []).append(fault)
    complete = tuple(case for case in cases if case.name not in by_name)
    if not cases and not faults:
        raise DataError(f"{path} fits no case: all it lists under 'training' are files that macOS left behind")
    if faults or not complete:
        raise DataError([*faults, *(fault for wrong in by_name.values() for fault in wrong)])
    folders = {file.parent for case in cases for file in (*case.images, case.label) if file is not None}
    warnings = [
        *warn_of_count(path, document, len(cases), len(entries)),
        *warn_of_labels(path, document, spec),
        *_warn_of_unlisted(cases),
        *warn_of_left_behind(path.parent, {*left_behind((path.parent, *folders)), *ignored}),
    ]
    in_order = sorted(cases, key=lambda case: case.name)
    return FoundCases(
        tuple(case for case in in_order if case.name not in by_name),
        tuple(warnings),
        tuple(case for case in in_order if case.name in by_name),
        {name: tuple(wrong) for name, wrong in by_name.items()},
    )


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


def _case_of(path: Path, number: int, entry: Any, finder: FileFinder) -> tuple[Case | None, list[str]]:
    """The case with the files of it that there are, and its faults; None where the entry names no file."""
    where = f"{path}: training[{number}]"
    if not isinstance(entry, dict):
        return None, [f"{where} is {entry!r:.80}; an object with 'image' and 'label' is expected"]
    images, label = _images_of(entry), entry.get("label")
    faults = []
    if not images:
        has = f"the label {label} has no image" if isinstance(label, str) else "there is no image"
        faults.append(f"{where}: {has}; give 'image' a path or a list of paths")
    if not isinstance(label, str) or not label:
        has = f"the image {images[0]} has no label" if images else "there is no label"
        faults.append(f"{where}: {has}; give 'label' a path")
    files = [finder.find(one) for one in images]
    label_file = finder.find(label) if isinstance(label, str) and label else None
    named = [("image", file) for file in files] + ([("label", label_file)] if label_file is not None else [])
    if not named:
        return None, faults
    there = []
    for kind, file in named:
        # os.path never raises, whatever the document has for a path
        if is_left_behind(file.name):
            faults.append(
                f"{where}: the {kind} {file} is what macOS left beside a file; name the {kind} or take the entry out"
            )
        elif not os.path.isfile(file):
            found = "is a folder" if os.path.isdir(file) else "does not exist"
            faults.append(f"{where}: the {kind} {file} {found}; put the file there or take the entry out")
        elif not is_nifti(file) and is_dicom(file):
            faults.append(
                f"{where}: the {kind} {file}: DICOM is not read here; set data.source.kind: dicom, or convert the series to NIfTI"
            )
        else:
            there.append(file)
    # Called after its image even where that is missing
    return Case(
        case_id(named[0][1]),
        tuple(file for file in files if file in there),
        label_file if label_file in there else None,
    ), faults


def _faults_of_repeats(path: Path, cases: list[Case]) -> list[str]:
    return [
        f"{path} lists case {name} {count} times; each case is listed once"
        for name, count in Counter(case.name for case in cases).items()
        if count > 1
    ]


def _faults_of_pairs(path: Path, cases: list[Case]) -> list[tuple[str, str]]:
    """(name of the case, fault) of each."""
    faults = []
    names = {case.name for case in cases}
    for case in cases:
        label = case_id(case.label) if case.label else case.name
        # A label may be called otherwise than its image, but not after another image: that is a list out of step.
        if label != case.name and label in names:
            fault = f"{path} pairs the image of case {case.name} with the label of case {label}; pair each with its own"
            faults.append((case.name, fault))
    return faults


def _warn_of_unlisted(cases: list[Case]) -> list[str]:
    used = {path.resolve() for case in cases for path in (*case.images, case.label) if path is not None}
    warnings = []
    for folder in sorted({case.images[0].parent for case in cases if case.images}):
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
