"""Owns what every source gives back, and the pairing of image and label files by id."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fasttrain.data.file_names import as_text, is_left_behind
from fasttrain.data.nifti import ENDINGS, case_id, is_nifti
from fasttrain.errors import DataError
from fasttrain.samples import Case

_NAMED = 5


@dataclass(frozen=True)
class FoundCases:
    """`cases` sorted by name, and one sentence for each oddity that does not stop a run.

    `incomplete` are cases whose files do not pair (an image without a label and the like), with the files of them that there
    are; `faults`: {name of such a case: its faults}.
    """

    cases: tuple[Case, ...]
    warnings: tuple[str, ...] = ()
    incomplete: tuple[Case, ...] = ()
    faults: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def every(self) -> tuple[Case, ...]:
        """Complete and incomplete cases, by name."""
        return tuple(sorted((*self.cases, *self.incomplete), key=lambda case: case.name))


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder, sorted, without hidden ones and those that `left_behind` counts.

    Raises DataError where the folder is missing or cannot be listed.
    """
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if not path.name.startswith(".") and not is_left_behind(path.name) and not path.is_dir()
        )
    except FileNotFoundError:
        raise DataError(f"{folder} does not exist") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file; a folder is expected") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror or error}") from error


def case_files(folder: Path, case_folders: bool) -> list[Path]:
    """The visible files of a folder or, with `case_folders`, those of the folders in it, one a case; raises DataError as
    `visible_files` does.
    """
    files = visible_files(folder)
    if not case_folders:
        return files
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [file for one in inside if not is_left_behind(one.name) for file in visible_files(one)]


def left_behind(folders: Iterable[Path]) -> list[Path]:
    """What lies directly in the folders and is a system's own (`._*`, `.DS_Store`, `__MACOSX`, …) or a hidden NIfTI file."""
    found: set[Path] = set()
    for folder in set(folders):
        # A folder that cannot be listed is told of where its files are looked for
        with contextlib.suppress(OSError):
            found |= {
                path
                for path in folder.iterdir()
                if is_left_behind(path.name) or (path.name.startswith(".") and is_nifti(path))
            }
    return sorted(found)


def warn_of_left_behind(root: Path, paths: Collection[Path]) -> list[str]:
    """One sentence with the count of what `left_behind` found, none where it is nothing."""
    if not paths:
        return []
    names = listed(path.name for path in sorted(paths))
    return [
        f"{root}: {len(paths)} file{'s' if len(paths) > 1 else ''} that macOS or Windows left behind, or that "
        f"{'are' if len(paths) > 1 else 'is'} hidden, ignored ({names})"
    ]


def listed(names: Iterable[str], limit: int = _NAMED) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = len(every) - limit
    return ", ".join(every[:limit]) + (f" and {more} more" if more > 0 else "")


def describe_files(folder: Path, dicom_read: bool = False) -> str:
    """What lies in a folder, for a sentence about what was found instead of cases."""
    try:
        entries = sorted(
            path for path in folder.iterdir() if not path.name.startswith(".") and not is_left_behind(path.name)
        )
    except OSError:
        return "no such folder"
    if not entries:
        return "an empty folder"
    folders = [f"{path.name}/" for path in entries if path.is_dir()]
    kinds = Counter(_ending(path) for path in entries if not path.is_dir())
    files = [f"{count} {kind} file{'s' if count > 1 else ''}" for kind, count in kinds.most_common(_NAMED)]
    dicom = (
        "; DICOM is not read with this data.source.kind, set it to dicom" if ".dcm" in kinds and not dicom_read else ""
    )
    return listed([*files, *folders]) + dicom


def index_by_id(
    paths: Iterable[Path], suffixes: Sequence[str], others: Sequence[str] = ()
) -> dict[str, dict[str, list[Path]]]:
    """NIfTI files by suffix and id. A file belongs to the longest suffix that ends its stem; `others` claim files too.

    Returns {suffix: {id: paths}}; files that no suffix fits are left out. Ids are in one Unicode form (`as_text`), whichever
    the file and the suffix have.
    """
    index: dict[str, dict[str, list[Path]]] = {suffix: {} for suffix in suffixes}
    as_given = {as_text(suffix): suffix for suffix in suffixes}
    by_length = sorted({*as_given, *map(as_text, others)}, key=len, reverse=True)
    for path in paths:
        if not is_nifti(path):
            continue
        stem = case_id(path)
        suffix = next((one for one in by_length if stem.endswith(one) and len(stem) > len(one)), None)
        if suffix in as_given:
            index[as_given[suffix]].setdefault(stem[: len(stem) - len(suffix)], []).append(path)
    return index


def pair_by_id(
    images: Mapping[str, Mapping[str, Sequence[Path]]],
    labels: Mapping[str, Sequence[Path]],
    channels: Sequence[tuple[str, str]],
    looked_for: str,
    found_instead: str,
) -> FoundCases:
    """Cases from {suffix: {id: paths}} and {id: paths}; an id that lacks a file or has one twice is an incomplete case.

    `channels` gives (suffix, channel name) in the recipe's order. Raises one DataError with the faults of all ids where none is
    complete; where no id occurs at all, with `looked_for` and `found_instead`.
    """
    names = sorted({*labels, *(name for suffix, _ in channels for name in images[suffix])})
    if not names:
        raise DataError(f"fits no case: looked for {looked_for}, found {found_instead}")
    cases: list[Case] = []
    incomplete: list[Case] = []
    faults_by_name: dict[str, tuple[str, ...]] = {}
    for name in names:
        faults: list[str] = []
        files = [(channel, images[suffix].get(name, ())) for suffix, channel in channels]
        missing = [channel for channel, paths in files if not paths]
        label = labels.get(name, ())
        twice = [paths for paths in (*(paths for _, paths in files), label) if len(paths) > 1]
        if len(missing) == len(files):
            faults.append(f"{label[0]}: the label of case {name} has no image; add {looked_for} or remove the label")
        elif missing:
            faults.append(f"case {name} lacks the image file of channel {', '.join(missing)}")
        if not label and len(missing) < len(files):
            first = next(paths[0] for _, paths in files if paths)
            faults.append(f"{first}: the image of case {name} has no label; add the label or remove the image")
        faults.extend(f"case {name} has two files where one is expected: {listed(map(str, paths))}" for paths in twice)
        case = Case(name, tuple(paths[0] for _, paths in files if paths), label[0] if label else None)
        (incomplete if faults else cases).append(case)
        if faults:
            faults_by_name[name] = tuple(faults)
    if not cases:
        every = [fault for faults in faults_by_name.values() for fault in faults]
        if not any(case.label and len(case.images) == len(channels) for case in incomplete):
            # Nothing fits at all: more likely the recipe's names are wrong than every file
            looked = f"looked for {looked_for}; is that how the files are named?"
            every.insert(0, f"no image has a label and all its channels: {looked}")
        raise DataError(every)
    return FoundCases(tuple(cases), (), tuple(incomplete), faults_by_name)


def _ending(path: Path) -> str:
    for ending in ENDINGS:
        if path.name.lower().endswith(ending):
            return ending
    return path.suffix.lower() or "unnamed-kind"
