"""Owns finding the volumes that `predict` is given: one file, or a folder in the file layout of the recipe's source."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.dicom import find_unlabelled_series
from fasttrain.data.sources.found import case_files, describe_files, index_by_id, listed, visible_files
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, DicomSource, FoldersSource, NnunetSource
from fasttrain.samples import Case

_NUMBERED = re.compile(r"(?P<id>.+)_(?P<number>\d{4})")
_MOST_CHANNELS = 8
"""More files of one name that are numbered are taken for cases."""


def find_unlabelled(
    spec: DataSpec, given: Path, suffixes: Sequence[str] | None = None, told: list[str] | None = None
) -> tuple[Case, ...]:
    """The cases of a file or folder, sorted by name, without labels.

    A source with one file a channel (nnU-Net's, or folders with several suffixes) is read so here too: of the file of any
    channel its siblings are found. `suffixes` are those of the training's channel files, where they were not in the order of
    the recipe. What `label_files` names is left out. Raises DataError where `given` is missing, holds no volume, or a channel's
    file lacks or is there twice; with `told` that takes the faults of such cases, and they alone are left out.
    """
    if not given.exists():
        raise DataError(f"{given} does not exist; name a NIfTI file or a folder of them")
    if isinstance(spec.source, DicomSource):
        return find_unlabelled_series(spec, given)
    suffixes = list(suffixes) if suffixes is not None else _suffixes(spec)
    if given.is_file():
        if is_left_behind(given.name):
            raise DataError(f"{given} is what macOS left beside a file, not an image; name the file itself")
        if not is_nifti(given):
            raise DataError(f"{given} is no NIfTI file (.nii or .nii.gz)")
        if len(suffixes) == 1:
            # One file is one case, whatever it is called and whatever lies beside it
            stem = case_id(given)
            return (Case(stem.removesuffix(as_text(suffixes[0])) or stem, (given,), None),)
    files = _files_of(spec, given if given.is_dir() else given.parent)
    labels = set(_labels_among(spec, files, suffixes))
    index = index_by_id([path for path in files if path not in labels], suffixes)
    names = sorted({name for by_name in index.values() for name in by_name})
    if given.is_file():
        names = [name for name in names if any(given in index[suffix].get(name, ()) for suffix in suffixes)]
    if not names and given.is_file():
        raise DataError(
            f"{given} is no file of one channel: its name should end in {listed(suffixes)} and .nii.gz or .nii"
        )
    if not names:
        ending = f", which all end as the run's labels do{_label_ending(spec)}" if labels else ""
        raise DataError(
            f"{given} holds no volume to predict: looked for CASE{suffixes[0]}.nii.gz, found {describe_files(given)}{ending}"
        )
    faults: dict[str, list[str]] = {}
    for name in names:
        missing = [
            channel for channel, suffix in zip(spec.channels, suffixes, strict=False) if name not in index[suffix]
        ]
        if missing:
            faults.setdefault(name, []).append(f"case {name} lacks the image file of channel {listed(missing)}")
    for name in names:
        faults.setdefault(name, []).extend(
            f"case {name} has two files where one is expected: {listed(map(str, index[suffix][name]))}"
            for suffix in suffixes
            if len(index[suffix].get(name, ())) > 1
        )
    every = [fault for of_one in faults.values() for fault in of_one]
    if every and told is None:
        raise DataError(every)
    if every and all(faults[name] for name in names):
        raise DataError(every)
    if told is not None:
        told.extend(every)
    names = [name for name in names if not faults[name]]
    return tuple(Case(name, tuple(index[suffix][name][0] for suffix in suffixes), None) for name in names)


def label_files(spec: DataSpec, given: Path, suffixes: Sequence[str] | None = None) -> tuple[Path, ...]:
    """The files of a folder that end as the labels of the run do (`data.source.label_suffix`), which no longer image suffix does.

    Where images and labels were trained on from folders of their own, only those beside an image of the same id: an image could
    happen to be called so. A file that is named by itself is an image, whatever it is called.
    """
    if not given.is_dir():
        return ()
    return _labels_among(spec, _files_of(spec, given), list(suffixes) if suffixes is not None else _suffixes(spec))


def _files_of(spec: DataSpec, folder: Path) -> list[Path]:
    """Those of one case, or where cases have folders and no volume lies beside these, of all cases."""
    files = visible_files(folder)
    in_folders = isinstance(spec.source, FoldersSource) and spec.source.case_folders and not any(map(is_nifti, files))
    return case_files(folder, True) if in_folders else files


def _labels_among(spec: DataSpec, files: Sequence[Path], suffixes: Sequence[str]) -> tuple[Path, ...]:
    source = spec.source
    if not isinstance(source, FoldersSource) or not source.label_suffix or source.label_suffix in suffixes:
        return ()
    labels = index_by_id(files, [source.label_suffix], suffixes)[source.label_suffix]
    if PurePosixPath(source.images) != PurePosixPath(source.labels):
        images = index_by_id(files, suffixes, [source.label_suffix])
        labels = {name: paths for name, paths in labels.items() if any(name in images[suffix] for suffix in suffixes)}
    return tuple(sorted(path for paths in labels.values() for path in paths))


def _label_ending(spec: DataSpec) -> str:
    return f" ({spec.source.label_suffix})" if isinstance(spec.source, FoldersSource) else ""


def passed_over(given: Path, cases: Sequence[Case], labels: Sequence[Path] = ()) -> tuple[Path, ...]:
    """The NIfTI files of a folder that belong to none of `cases` and are none of `labels`, since their names end otherwise."""
    if not given.is_dir():
        return ()
    used = {path for case in cases for path in case.images} | set(labels)
    return tuple(path for path in visible_files(given) if is_nifti(path) and path not in used)


def channels_of_one_case(cases: Sequence[Case]) -> tuple[tuple[str, ...], ...]:
    """Groups of one-file cases that are named as nnU-Net names the channels of a case: `CASE_0000`, `CASE_0001` and so on.

    Numbers that begin otherwise, leave one out or go on for longer than channels do count cases.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if len(case.images) == 1 and (match := _NUMBERED.fullmatch(case.name)):
            groups[match["id"]].append(case.name)
    return tuple(
        tuple(sorted(names))
        for _, names in sorted(groups.items())
        if 2 <= len(names) <= _MOST_CHANNELS and sorted(int(name[-4:]) for name in names) == list(range(len(names)))
    )


def channel_suffixes(spec: DataSpec, case: Case) -> list[str] | None:
    """What follows the id in the names of a training case's files, where the data set and not the recipe decides it.

    An nnU-Net folder's `dataset.json` numbers the channels by name; `predict` may meet files that have no such table beside
    them. None for every other source.
    """
    if not isinstance(spec.source, NnunetSource):
        return None
    return [case_id(path).removeprefix(case.name) for path in case.images]


def _suffixes(spec: DataSpec) -> list[str]:
    if isinstance(spec.source, NnunetSource):
        return [f"_{number:04d}" for number in range(len(spec.channels))]
    if isinstance(spec.source, FoldersSource):
        return list(spec.source.image_suffixes)
    return [""]
