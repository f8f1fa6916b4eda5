"""Owns finding the cases that a recipe means, and the hint where the folder has another layout than the recipe says."""

from __future__ import annotations

import shlex
from pathlib import Path

from fasttrain.data.layouts import look_at_layout
from fasttrain.data.sources import FoundCases, look_for_cases
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, FoldersSource, SourceSpec

_NAMES = {
    "decathlon": "the Decathlon's layout (a dataset.json with a list under 'training')",
    "nnunet": "nnU-Net's layout (imagesTr/CASE_0000.nii.gz)",
    "folders": "images and labels in plain folders",
    "dicom": "a folder of DICOM a case",
}


def cases_for(data: DataSpec, root: Path) -> FoundCases:
    """Complete and incomplete cases, see `look_for_cases`.

    Raises DataError where nothing fits; where another layout would, it says by which settings.
    """
    try:
        return look_for_cases(data, root)
    except DataError as error:
        hint = _hint(data.source, root)
        if hint is None:
            raise
        *others, last = error.faults
        raise DataError([*others, f"{last}; {hint}"]) from error


def _hint(given: SourceSpec, root: Path) -> str | None:
    if given.kind == "phantom" or not root.is_dir():
        return None
    try:
        source = look_at_layout(root).source
    except (DataError, OSError):
        return None
    if source.kind == given.kind and (not isinstance(source, FoldersSource) or source == given):
        return None
    return f"{root} looks like {_NAMES[source.kind]}: {settings_for(source)}"


def settings_for(source: SourceSpec) -> str:
    """The `--set` options that make a recipe read a layout."""
    values: dict[str, str] = {"kind": source.kind}
    if isinstance(source, FoldersSource):
        suffixes = ",".join(f'"{suffix}"' for suffix in source.image_suffixes)
        values |= {
            "images": source.images,
            "labels": source.labels,
            "image_suffixes": f"[{suffixes}]",
            "label_suffix": source.label_suffix,
            "case_folders": str(source.case_folders).lower(),
        }
        defaults = FoldersSource(kind="folders")
        if source.image_suffixes == defaults.image_suffixes:
            del values["image_suffixes"]
        for key in ("images", "labels", "label_suffix", "case_folders"):
            if getattr(source, key) == getattr(defaults, key):
                del values[key]
    return " ".join(f"--set {shlex.quote(f'data.source.{key}={value}')}" for key, value in values.items())
