"""Owns the guess of how image and label files in plain folders are named: their folders, and the suffixes after a case's id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.nifti import case_id, is_nifti, read_file
from fasttrain.errors import DataError

_IMAGES = (
    "images",
    "image",
    "imagestr",
    "imgs",
    "img",
    "volumes",
    "volume",
    "scans",
    "inputs",
    "data",
    "ct",
    "mr",
    "mri",
)
_LABELS = (
    "labels", "label", "labelstr", "masks", "mask", "segmentations", "segmentation", "segs", "seg", "annotations",
    "ground_truth", "groundtruth", "gt", "targets",
)  # fmt: skip
_PARTS = ("train", "training", "tr")
_LABEL_WORDS = re.compile(r"label|seg|mask|truth|annot|contour|(?:^|[_\-. ])gt(?:$|[_\-. ])", re.IGNORECASE)
_SEPARATORS = "_-. "
_LEAST_SHARE = 0.8
"""Of the files that must fit a pattern; the reading of the layout then names each of the others."""
_FILES_LOOKED_INTO = 2
_MOST_VALUES = 128
_MOST_SUFFIXES = 64


@dataclass(frozen=True)
class FolderPattern:
    """What `data.source` of kind `folders` takes; the folders are relative to the set's."""

    images: str
    labels: str
    image_suffixes: tuple[str, ...]
    label_suffix: str
    case_folders: bool = False

    @property
    def in_one_below(self) -> bool:
        """Whether images and labels lie together in one folder below the set's: the first that fitted, others may as well."""
        return self.images == self.labels != "."


@dataclass(frozen=True)
class _Fit:
    image_suffixes: tuple[str, ...]
    label_suffix: str
    cases: int


def find_pattern(root: Path) -> FolderPattern | None:
    """The first pair of folders, or the one folder, whose file names pair images with labels; None where none do."""
    for images, labels in _folder_pairs(root):
        fit = _fit(_stems(images), _stems(labels))
        if fit is not None:
            return FolderPattern(_below(root, images), _below(root, labels), fit.image_suffixes, fit.label_suffix)
    fit = _fit_side_by_side(_files_of_case_folders(root))
    if fit is not None:
        return FolderPattern(".", ".", fit.image_suffixes, fit.label_suffix, case_folders=True)
    for folder in (root, *folders_in(root).values()):
        fit = _fit_side_by_side(_files(folder))
        if fit is not None:
            return FolderPattern(_below(root, folder), _below(root, folder), fit.image_suffixes, fit.label_suffix)
    return None


def _folder_pairs(root: Path) -> Iterator[tuple[Path, Path]]:
    top = folders_in(root)
    for base in (root, *(top[part] for part in _PARTS if part in top)):
        inside = folders_in(base)
        for images in (inside[name] for name in _IMAGES if name in inside):
            for labels in (inside[name] for name in _LABELS if name in inside):
                yield images, labels
                image_parts, label_parts = folders_in(images), folders_in(labels)
                for part in _PARTS:
                    if part in image_parts and part in label_parts:
                        yield image_parts[part], label_parts[part]


def _fit(images: Sequence[str], labels: Sequence[str]) -> _Fit | None:
    """The suffixes that make a case of most labels. Among those that fit as many, the longest id."""
    fits = []
    for suffix in _shared_suffixes(labels):
        ids = {stem[: len(stem) - len(suffix)] for stem in labels if stem.endswith(suffix) and len(stem) > len(suffix)}
        fit = _fit_of_ids(images, ids, suffix)
        if fit is not None:
            fits.append(fit)
    return max(fits, key=lambda fit: (fit.cases, -len(fit.label_suffix)), default=None)


def _fit_of_ids(images: Sequence[str], ids: set[str], label_suffix: str) -> _Fit | None:
    """An image belongs to the longest id that it begins with; what is left of its name is its suffix."""
    suffixes: dict[str, set[str]] = {}
    for stem in images:
        owner = next((stem[:cut] for cut in _cuts(stem) if stem[:cut] in ids), None)
        if owner is not None:
            suffixes.setdefault(owner, set()).add(stem[len(owner) :])
    if not suffixes:
        return None
    counted = Counter(frozenset(found) for found in suffixes.values())
    commonest, cases = max(counted.items(), key=lambda item: (item[1], len(item[0])))
    if cases < _LEAST_SHARE * len(ids):
        return None
    return _Fit(tuple(sorted(commonest)), label_suffix, cases)


def _files_of_case_folders(root: Path) -> list[Path]:
    """The files of the folders below `root` where most of these are named as their files begin, several files each (BraTS)."""
    folders, files = list(folders_in(root).values()), []
    if _files(root):
        return []
    for folder in folders:
        inside = _files(folder)
        if len(inside) > 1 and all(case_id(path).startswith(as_text(folder.name)) for path in inside):
            files.append(inside)
    return [path for inside in files for path in inside] if len(files) > max(_LEAST_SHARE * len(folders) - 1, 0) else []


def _fit_side_by_side(paths: Sequence[Path]) -> _Fit | None:
    """Images and labels in one place: the label's suffix says that it is one, else the file's values do."""
    stems = [case_id(path) for path in paths]
    fits: list[tuple[int, int, int, _Fit]] = []
    for suffix in _suffixes_of(stems)[:_MOST_SUFFIXES]:
        labels = [stem for stem in stems if stem.endswith(suffix) and len(stem) > len(suffix)]
        images = [stem for stem in stems if not stem.endswith(suffix)]
        fit = _fit_of_ids(images, {stem[: len(stem) - len(suffix)] for stem in labels}, suffix) if labels else None
        if fit is None or fit.cases * len(fit.image_suffixes) < _LEAST_SHARE * len(images):
            continue
        files = [path for path, stem in zip(paths, stems, strict=True) if stem in set(labels)]
        values = 0 if _LABEL_WORDS.search(suffix) else _label_values(files[:_FILES_LOOKED_INTO])
        if values is not None:
            fits.append((values, -fit.cases, len(suffix), fit))
    return min(fits, key=lambda entry: entry[:3])[3] if fits else None


def _label_values(paths: Sequence[Path]) -> int | None:
    """The most values that one of the files holds; None where they cannot be labels (or cannot be read)."""
    most = 0
    for path in paths:
        try:
            file = read_file(path)
        except DataError:
            return None
        found = np.unique(file.raw) * file.slope + file.intercept
        if (
            not np.isfinite(found).all()
            or found.min() < 0
            or found.max() > 255
            or np.abs(found - np.rint(found)).max() > 0.01
        ):
            return None
        most = max(most, len(found))
    return most if most <= _MOST_VALUES else None


def _shared_suffixes(stems: Sequence[str]) -> list[str]:
    counted = Counter(suffix for stem in stems for suffix in {"", *(stem[cut:] for cut in _cuts(stem))})
    return [suffix for suffix, count in counted.items() if count >= _LEAST_SHARE * len(stems)]


def _suffixes_of(stems: Sequence[str]) -> list[str]:
    """Commonest first, without mere numbers, which tell cases apart and not kinds of files."""
    counted = Counter(stem[cut:] for stem in stems for cut in _cuts(stem)).most_common()
    return [suffix for suffix, _ in counted if suffix.strip(_SEPARATORS + "0123456789")]


def _cuts(stem: str) -> Iterator[int]:
    """Where a name may part into id and suffix, the longest id first: at its end and before each separator."""
    yield len(stem)
    for index in range(len(stem) - 1, 0, -1):
        if stem[index] in _SEPARATORS:
            yield index


def folders_in(folder: Path) -> dict[str, Path]:
    """The folders directly in a folder that are not hidden, by lower-case name."""
    try:
        return {
            path.name.lower(): path
            for path in sorted(folder.iterdir())
            if path.is_dir() and path.name[0] != "." and not is_left_behind(path.name)
        }
    except OSError:
        return {}


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_nifti(path) and path.name[0] != "." and path.is_file())
    except OSError:
        return []


def _stems(folder: Path) -> list[str]:
    return [case_id(path) for path in _files(folder)]


def _below(root: Path, folder: Path) -> str:
    return as_text(folder.relative_to(root).as_posix())
