"""Owns a folder of DICOM a case: which series is the image, and which mask was drawn on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fasttrain.data.dicom.contents import Contents, Series, drawn_on, mask_kind, structures_of
from fasttrain.data.dicom.instances import (
    instance_of,
    is_dicom,
    look_into,
    plain_name,
)
from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.sources.found import FoundCases, describe_files, listed, visible_files
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, DicomSource
from fasttrain.samples import Case, Drawn
from fasttrain.wording import counted

_MOST_NAMED = 6
_LOOKED_AT = 20
_MASKS = {"seg": "DICOM SEG", "rtstruct": "RTSTRUCT", "nifti": "NIfTI mask"}


def find_dicom(spec: DataSpec, root: Path) -> FoundCases:
    """A case a folder in `root`, of the folder's name, with the series and the mask that `data.source` picks.

    A case is incomplete whose series or mask is not there or not the only one, or whose folders hold other files than DICOM
    among the slices. Raises DataError where no folder holds DICOM, or every case has faults.
    """
    source = _source(spec)
    wanted = _one_a_channel(source, spec)
    cases: list[Case] = []
    incomplete: list[Case] = []
    faults: dict[str, tuple[str, ...]] = {}
    without: list[str] = []
    for folder in _folders_in(root):
        contents = Contents(folder, source.ignore)
        if not contents.holds_dicom:
            without.append(folder.name)
            continue
        case, wrong = _labelled_case(spec, source, wanted, root, folder, contents)
        (incomplete if wrong else cases).append(case)
        if wrong:
            faults[case.name] = tuple(wrong)
    if not cases and not incomplete:
        loose = sum(is_dicom(path) for path in visible_files(root))
        hint = f"; {counted(loose, 'DICOM file')} lie there without a folder of their own" if loose else ""
        raise DataError(
            f"{root} fits no case: looked for a folder a case with DICOM files in it or below it, found "
            f"{describe_files(root, True)}{hint}"
        )
    if not cases:
        raise DataError(fault for wrong in faults.values() for fault in wrong)
    warnings = (
        [f"{root}: {counted(len(without), 'folder')} without DICOM not used ({listed(without)})"] if without else []
    )
    by_name = lambda case: case.name  # noqa: E731
    return FoundCases(
        tuple(sorted(cases, key=by_name)), tuple(warnings), tuple(sorted(incomplete, key=by_name)), faults
    )


def find_unlabelled_series(spec: DataSpec, given: Path) -> tuple[Case, ...]:
    """The cases of a DICOM file, of a folder of slices, or of a folder of such folders, sorted by name, without labels.

    One NIfTI file, or a folder of NIfTI files without DICOM, is taken as well. Raises DataError with the faults of every case.
    """
    source = _source(spec)
    wanted = _one_a_channel(source, spec)
    if given.is_file():
        if is_nifti(given):
            return (Case(case_id(given), (given,), None),)
        if not is_dicom(given):
            raise DataError(f"{given} is neither a DICOM nor a NIfTI file")
        if len(wanted) > 1:
            raise DataError(
                f"{given} is one series, and the run has {len(wanted)} channels; name the folder of the case"
            )
        return (Case(as_text(given.absolute().parent.name), (given,), None),)
    folders = [given] if any(look_into(given).instances) else _folders_in(given)
    cases, faults = [], []
    for folder in folders:
        contents = Contents(folder, source.ignore)
        if not contents.holds_dicom:
            continue
        images, wrong = _images(source, wanted, contents)
        faults.extend(wrong)
        cases.append(Case(as_text(folder.absolute().name), images, None))
    if not cases:
        cases = [Case(case_id(path), (path,), None) for path in visible_files(given) if is_nifti(path)]
    if not cases and not faults:
        raise DataError(
            f"{given} holds no volume to predict: looked for DICOM files, folders of them and NIfTI files, found "
            f"{describe_files(given, True)}"
        )
    if faults:
        raise DataError(faults)
    return tuple(sorted(cases, key=lambda case: case.name))


def holds_dicom(root: Path) -> bool:
    """Whether a folder in `root` has a DICOM file in it or below it; of each folder the first files are looked at."""
    for folder in _folders_in(root):
        for place, below, names in os.walk(folder):
            below[:] = [name for name in below if not name.startswith(".")]
            likely = (name for name in sorted(names) if not name.startswith(".") and not is_nifti(Path(name)))
            if any(is_dicom(Path(place) / name) for name in islice(likely, _LOOKED_AT)):
                return True
    return False


def structure_names(root: Path) -> list[str]:
    """The names of the structures in all DICOM masks of the set, each once, in the order in which they come up."""
    found: dict[str, str] = {}
    for folder in _folders_in(root):
        for mask in Contents(folder, ()).masks:
            for name in structures_of(mask.first):
                found.setdefault(plain_name(name), name)
    return list(found.values())


def modality_of(path: Path) -> str:
    """`CT`, `MR` and so on, of a DICOM file; empty where it does not say."""
    return instance_of(path).modality


def _labelled_case(
    spec: DataSpec,
    source: DicomSource,
    wanted: Sequence[str | int | None],
    root: Path,
    folder: Path,
    contents: Contents,
) -> tuple[Case, list[str]]:
    name = as_text(folder.name)
    images, faults = _images(source, wanted, contents)
    beside = [path for path in visible_files(root) if is_nifti(path) and case_id(path) == name]
    label, wrong = _mask(source, contents, beside, images) if images else (None, [])
    if label is None or is_nifti(label):
        return Case(name, images, label), [*faults, *wrong]
    values = source.structures or {spec.classes[value]: value for value in sorted(spec.classes)}
    drawn = Drawn(images[0], tuple(values.items()), bool(source.structures), source.other_structures)
    return Case(name, images, label, drawn), [*faults, *wrong]


def _images(
    source: DicomSource, wanted: Sequence[str | int | None], contents: Contents
) -> tuple[tuple[Path, ...], list[str]]:
    """The first file of each series that is wanted, none where one is in doubt, and what is wrong."""
    chosen: list[Series] = []
    faults: list[str] = []
    for name in wanted:
        found = contents.images if name is None else [one for one in contents.images if one.is_called(name)]
        if len(found) == 1:
            chosen.append(found[0])
            continue
        called = "" if name is None else f" called {name!r}"
        there = _named(contents.images) or "none"
        if not found:
            faults.append(f"{contents.folder} holds no series of images{called}; found {there}")
        else:
            faults.append(
                f"{contents.folder} holds {len(found)} series of images{called}: {_named(found)}; pick one with "
                "data.source.series, by its SeriesInstanceUID, number or description"
            )
    # Files that cannot be read may be slices of a series that then looks whole
    folders = [one.folder for one in chosen] if chosen and not faults else list(contents.looked)
    strangers = [
        f"{folder}: {counted(len(names), 'file')} among the DICOM files, of which each {why} ({listed(names)}); get them "
        "anew, move them away, or name them in data.source.ignore"
        for (folder, why), names in contents.strangers(folders).items()
    ]
    if faults:
        return (), [*faults, *strangers]
    return tuple(one.first.path for one in chosen), strangers


def _mask(
    source: DicomSource, contents: Contents, beside: Sequence[Path], images: Sequence[Path]
) -> tuple[Path | None, list[str]]:
    """The one mask that was drawn on the chosen series, or what is wrong."""
    kinds = ("seg", "rtstruct", "nifti") if source.labels == "auto" else (source.labels,)
    by_path = {one.first.path: one.first.series for one in contents.images}
    series = {by_path[path] for path in images}
    masks = [one for one in contents.masks if mask_kind(one.first) in kinds]
    if source.label_series is not None:
        masks = [one for one in masks if one.is_called(source.label_series)]
    on_others = [one for one in masks if (targets := drawn_on(one.first)) and not targets & series]
    fitting = [one for one in masks if one not in on_others]
    files = [one.first.path for one in fitting]
    told_of = [f"{_MASKS[mask_kind(one.first) or 'seg']} {one.first.path}" for one in fitting]
    if "nifti" in kinds and source.label_series is None:
        files += [*contents.nifti, *beside]
        told_of += [f"{_MASKS['nifti']} {path}" for path in (*contents.nifti, *beside)]
    if len(files) == 1:
        return files[0], []
    if files:
        return None, [
            f"{contents.folder} has {len(files)} masks where one is expected: {listed(told_of)}; pick one with "
            "data.source.labels (seg, rtstruct or nifti) or data.source.label_series, or move the others away"
        ]
    if on_others:
        return None, [
            f"{one.first.path} was drawn on series {', '.join(sorted(drawn_on(one.first)))}, but the image is series "
            f"{', '.join(sorted(series))}; pick its series with data.source.series"
            for one in on_others
        ]
    expected = " or ".join(_MASKS[kind] for kind in kinds)
    called = "" if source.label_series is None else f" in a series called {source.label_series!r}"
    return None, [
        f"{contents.folder}: the case has no label; looked for a {expected}{called} in it, or "
        f"{contents.folder.name}.nii.gz beside it"
    ]


def _one_a_channel(source: DicomSource, spec: DataSpec) -> tuple[str | int | None, ...]:
    wanted = source.series if isinstance(source.series, tuple) else (source.series,)
    if len(wanted) != len(spec.channels):
        raise DataError(
            f"data.source.series names {counted(len(wanted), 'series', 'series')} for "
            f"{counted(len(spec.channels), 'channel')}; a series of DICOM holds one channel, so give a list with one a channel"
        )
    return wanted


def _named(series: Sequence[Series]) -> str:
    return listed(map(str, series), _MOST_NAMED)


def _folders_in(root: Path) -> list[Path]:
    try:
        inside = [path for path in root.iterdir() if path.is_dir()]
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {error.strerror or error}") from error
    return sorted(path for path in inside if not path.name.startswith(".") and not is_left_behind(path.name))


def _source(spec: DataSpec) -> DicomSource:
    assert isinstance(spec.source, DicomSource)
    return spec.source
