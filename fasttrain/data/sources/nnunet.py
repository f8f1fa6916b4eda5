"""Owns the nnU-Net v2 layout: `imagesTr/CASE_0000.nii.gz`, one file a channel, and `labelsTr/CASE.nii.gz`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasttrain.data.nifti import ENDINGS, case_id, is_nifti
from fasttrain.data.sources.dataset_json import channel_table, read_dataset_json, warn_of_count, warn_of_labels
from fasttrain.data.sources.found import (
    FoundCases,
    describe_files,
    index_by_id,
    left_behind,
    listed,
    pair_by_id,
    visible_files,
    warn_of_left_behind,
)
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.wording import counted

_NUMBERED = re.compile(r"_\d{4}$")


def find_nnunet(spec: DataSpec, root: Path) -> FoundCases:
    """Cases by id. Where a `dataset.json` names all the recipe's channels they are taken by name, else by their order.

    A case that lacks a channel file, an image or a label is incomplete. Raises DataError where nothing fits.
    """
    document_path = root / "dataset.json"
    document = read_dataset_json(document_path) if document_path.is_file() else {}
    faults: list[str] = []
    folders: dict[str, list[Path]] = {}
    for name in ("imagesTr", "labelsTr"):
        try:
            folders[name] = visible_files(root / name)
        except DataError as error:
            listing = f", and the list 'dataset' in {document_path.name} is not read" if "dataset" in document else ""
            faults.extend(f"{fault}; {root} holds {describe_files(root)}{listing}" for fault in error.faults)
    if faults:
        raise DataError(faults)
    numbers, warnings = _channel_numbers(spec, document_path, document)
    folders, unused = _with_ending(document_path, document, folders)
    warnings += unused
    suffixes = [f"_{number:04d}" for number in numbers]
    images = index_by_id(folders["imagesTr"], suffixes)
    labels = index_by_id(folders["labelsTr"], [""])[""]
    found = pair_by_id(
        images,
        labels,
        list(zip(suffixes, spec.channels, strict=True)),
        looked_for=f"imagesTr/CASE{suffixes[0]}.nii.gz with labelsTr/CASE.nii.gz",
        found_instead=f"{describe_files(root / 'imagesTr')} in imagesTr",
    )
    warnings += _warn_of_others(root / "imagesTr", folders["imagesTr"], suffixes)
    if document:
        warnings += warn_of_labels(document_path, document, spec)
        warnings += warn_of_count(document_path, document, len(found.every))
    warnings += warn_of_left_behind(root, left_behind((root, root / "imagesTr", root / "labelsTr")))
    return replace(found, warnings=tuple(warnings))


def _with_ending(
    path: Path, document: dict[str, Any], folders: dict[str, list[Path]]
) -> tuple[dict[str, list[Path]], list[str]]:
    """The files that end in `file_ending`, the only ones that nnU-Net takes, and one sentence on those that end otherwise."""
    ending = document.get("file_ending")
    if ending is None:
        return folders, []
    if not isinstance(ending, str) or ending.lower() not in ENDINGS:
        raise DataError(
            f"{path} says file_ending is {ending!r:.80}, but {' and '.join(ENDINGS)} are read; convert the files to NIfTI and "
            "set it to .nii.gz"
        )
    chosen = {
        name: [file for file in files if file.name.lower().endswith(ending.lower())] for name, files in folders.items()
    }
    others = [file for name, files in folders.items() for file in files if is_nifti(file) and file not in chosen[name]]
    if not others:
        return chosen, []
    names = listed(file.name for file in others)
    otherwise = "end otherwise are" if len(others) > 1 else "ends otherwise is"
    return chosen, [
        f"{path} says file_ending is {ending}; {counted(len(others), 'file')} that {otherwise} not used ({names})"
    ]


def _channel_numbers(spec: DataSpec, path: Path, document: dict[str, Any]) -> tuple[list[int], list[str]]:
    by_order = list(range(len(spec.channels)))
    table = channel_table(document)
    if not table:
        return by_order, []
    numbers = {name.casefold(): number for number, name in table.items()}
    wanted = [name.casefold() for name in spec.channels]
    if len(numbers) == len(table) and all(name in numbers for name in wanted):
        return [numbers[name] for name in wanted], []
    names = ", ".join(table.values())
    return by_order, [
        f"{path} names the channels {names}, but data.channels {', '.join(spec.channels)}; taken by their order"
    ]


def _warn_of_others(folder: Path, paths: list[Path], suffixes: list[str]) -> list[str]:
    stems = [case_id(path) for path in paths if is_nifti(path)]
    more = sorted({stem[-5:] for stem in stems if _NUMBERED.search(stem)} - set(suffixes))
    warnings = []
    if more:
        warnings.append(
            f"{folder} also holds channel files {listed(more)}, which data.channels does not name; not used"
        )
    unnumbered = [stem for stem in stems if not _NUMBERED.search(stem)]
    if unnumbered:
        warnings.append(f"{folder} holds files without a channel number ({listed(unnumbered)}); not used")
    return warnings
