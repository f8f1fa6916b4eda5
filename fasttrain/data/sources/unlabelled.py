"""Owns finding the volumes that `predict` is given: one file, or a folder in the file layout of the recipe's source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.found import describe_files, index_by_id, listed, visible_files
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, FoldersSource, NnunetSource
from fasttrain.samples import Case


def find_unlabelled(spec: DataSpec, given: Path, suffixes: Sequence[str] | None = None) -> tuple[Case, ...]:
    """The cases of a file or folder, sorted by name, without labels.

    A source with one file a channel (nnU-Net's, or folders with several suffixes) is read so here too: of the file of any
    channel its siblings are found. `suffixes` are those of the training's channel files, where they were not in the order of
    the recipe. Raises DataError where `given` is missing, holds no volume, or a channel's file lacks or is there twice.
    """
    if not given.exists():
        raise DataError(f"{given} does not exist; name a NIfTI file or a folder of them")
    suffixes = list(suffixes) if suffixes is not None else _suffixes(spec)
    if given.is_file():
        if not is_nifti(given):
            raise DataError(f"{given} is no NIfTI file (.nii or .nii.gz)")
        if len(suffixes) == 1:
            # One file is one case, whatever it is called and whatever lies beside it
            stem = case_id(given)
            return (Case(stem.removesuffix(suffixes[0]) or stem, (given,), None),)
    index = index_by_id(visible_files(given if given.is_dir() else given.parent), suffixes)
    names = sorted({name for by_name in index.values() for name in by_name})
    if given.is_file():
        names = [name for name in names if any(given in index[suffix].get(name, ()) for suffix in suffixes)]
    if not names and given.is_file():
        raise DataError(
            f"{given} is no file of one channel: its name should end in {listed(suffixes)} and .nii.gz or .nii"
        )
    if not names:
        raise DataError(
            f"{given} holds no volume to predict: looked for CASE{suffixes[0]}.nii.gz, found {describe_files(given)}"
        )
    faults = [
        f"case {name} lacks the image file of channel {listed(missing)}"
        for name in names
        if (
            missing := [
                channel for channel, suffix in zip(spec.channels, suffixes, strict=False) if name not in index[suffix]
            ]
        )
    ]
    faults += [
        f"case {name} has two files where one is expected: {listed(map(str, index[suffix][name]))}"
        for name in names
        for suffix in suffixes
        if len(index[suffix].get(name, ())) > 1
    ]
    if faults:
        raise DataError(faults)
    return tuple(Case(name, tuple(index[suffix][name][0] for suffix in suffixes), None) for name in names)


def passed_over(spec: DataSpec, given: Path, cases: Sequence[Case]) -> tuple[Path, ...]:
    """The NIfTI files of a folder that belong to none of `cases`, since their names end otherwise."""
    if not given.is_dir():
        return ()
    used = {path for case in cases for path in case.images}
    return tuple(path for path in visible_files(given) if is_nifti(path) and path not in used)


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
