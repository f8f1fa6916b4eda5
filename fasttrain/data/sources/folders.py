"""Owns plain folders: image and label files paired by what their names share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fasttrain.data.file_names import FileFinder
from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.found import (
    FoundCases,
    case_files,
    describe_files,
    index_by_id,
    left_behind,
    listed,
    pair_by_id,
    warn_of_left_behind,
)
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, FoldersSource
from fasttrain.wording import counted


def find_folders(spec: DataSpec, root: Path) -> FoundCases:
    """Cases by id: the file name less its ending and less `image_suffixes` or `label_suffix`.

    A case that lacks a channel file, an image or a label is incomplete. Raises DataError where nothing fits.
    """
    source = spec.source
    assert isinstance(source, FoldersSource)
    if len(source.image_suffixes) not in (1, len(spec.channels)):
        raise DataError(
            f"data.source.image_suffixes has {counted(len(source.image_suffixes), 'entry', 'entries')} for "
            f"{counted(len(spec.channels), 'channel')}; give one for a file with all channels, or one a channel"
        )
    if len(set(source.image_suffixes)) != len(source.image_suffixes):
        raise DataError("data.source.image_suffixes names a suffix twice; each channel has its own")
    faults: list[str] = []
    files: list[list[Path]] = []
    finder = FileFinder(root)
    folders = [finder.find(source.images), finder.find(source.labels)]
    for folder in folders:
        try:
            files.append(case_files(folder, source.case_folders))
        except DataError as error:
            faults.extend(f"{fault}; {root} holds {describe_files(root)}" for fault in error.faults)
    if faults:
        raise DataError(faults)
    shared = folders[0].resolve() == folders[1].resolve()
    if shared and source.label_suffix in source.image_suffixes:
        raise DataError(
            f"data.source: images and labels share {folders[0]} and the suffix {source.label_suffix!r}; give "
            "label_suffix what sets labels apart"
        )
    images = index_by_id(files[0], source.image_suffixes, [source.label_suffix] if shared else ())
    labels = index_by_id(files[1], [source.label_suffix], source.image_suffixes if shared else ())[source.label_suffix]
    names = spec.channels if len(source.image_suffixes) > 1 else (", ".join(spec.channels),)
    inner = "CASE/" if source.case_folders else ""
    image, label = f"{inner}CASE{source.image_suffixes[0]}.nii.gz", f"{inner}CASE{source.label_suffix}.nii.gz"
    pattern = f"{source.images}/{image} with {source.labels}/{label}"
    found = pair_by_id(
        images,
        labels,
        list(zip(source.image_suffixes, names, strict=True)),
        looked_for=pattern,
        found_instead=f"{describe_files(folders[0])} in {source.images}",
    )
    warnings = [*_warn_of_unused(files, found, pattern), *warn_of_left_behind(root, left_behind((root, *folders)))]
    return replace(found, warnings=tuple(warnings))


def _warn_of_unused(files: list[list[Path]], found: FoundCases, pattern: str) -> list[str]:
    used = {path for case in found.every for path in (*case.images, case.label)}
    extra = sorted({case_id(path) for group in files for path in group if is_nifti(path) and path not in used})
    return (
        [
            f"{counted(len(extra), 'file')} {'do' if len(extra) > 1 else 'does'} not fit {pattern} ({listed(extra)}); not used"
        ]
        if extra
        else []
    )
