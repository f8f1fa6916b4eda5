"""Owns what a kept volume depends on: its key changes whenever the files, the recipe or the code would give another volume."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from fasttrain.data.preprocess import Preprocess
from fasttrain.data.volume_files import dicom_versions, files_of_case
from fasttrain.samples import Case

# What preprocessing does not read. All else is in the key, so that a setting added to the recipe later is in it from the first
# day; being in it without need costs one rebuild, being left out costs wrong voxels.
_NOT_OF_THE_VOLUME = {
    "name",
    "source",
    "split",
    "samples_per_case",
    "slices",
    "cache",
    "workers",
    "prefetch_factor",
    "worker_kind",
    "pin_memory",
    "copy_stream",
    "bad_cases",
    "regions",
}
_NOT_OF_THE_PATCH_PLACE = {"foreground", "foreground_by"}
_PACKAGES = ("fasttrain", "monai", "torch", "numpy", "nibabel")


def settings_of(preprocess: Preprocess) -> dict[str, Any]:
    """All that the volumes of a set have in common: recipe parts, versions, the code itself. Plain values for JSON.

    The patch counts in training alone, where volumes are padded to it. Augmentation and the batch do not.
    """
    return {
        "steps": f"{type(preprocess).__module__}.{type(preprocess).__qualname__}",
        "training": preprocess.training,
        "dimensions": preprocess.dimensions,
        "task": preprocess.task,
        "data": preprocess.data.model_dump(mode="json", exclude=_NOT_OF_THE_VOLUME),
        "slices": preprocess.data.sliced_across,
        "patch": preprocess.patch.model_dump(mode="json", exclude=_NOT_OF_THE_PATCH_PLACE)
        if preprocess.training
        else None,
        "code": _code_digest(),
        **{name: _version(name) for name in _PACKAGES},
        # Not for sets of NIfTI files, whose volumes stay what they are when these are installed
        **(dicom_versions() if preprocess.data.source.kind == "dicom" else {}),
    }


def settings_digest(preprocess: Preprocess) -> str:
    """A name for the settings: 32 hexadecimal digits."""
    return _digest(settings_of(preprocess))


def place_of(case: Case) -> str:
    """A name for a case's entry among those of its settings: the same whatever its files hold, so that what is built from
    changed files takes the place of what it supersedes.
    """
    return _digest([case.name, [str(path.absolute()) for path in case.images], _text(case.label)])


def key_of(settings: str, case: Case) -> str | None:
    """What a case's volume depends on, `settings` included; None where one of its files cannot be looked at."""
    files = []
    for path in files_of_case(case):
        try:
            seen = os.stat(path)
        except (OSError, ValueError):
            return None
        # The time of change can be set, as `touch`, `cp -p` and tar do; the last one can't. No inode: on some network disks
        # a file has another one after each mount
        files.append([str(path.absolute()), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns])
    drawn = [] if case.drawn is None else [str(case.drawn)]
    # Which of the files in a folder of DICOM is meant tells the series
    return _digest([settings, case.name, [str(path.absolute()) for path in case.images], files, *drawn])


@functools.lru_cache(maxsize=1)
def _code_digest() -> str:
    """Of the modules that make volumes: in a checkout the code changes and the version does not."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parents[1]
    for path in sorted((*folder.glob("*.py"), *folder.glob("dicom/*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(name: str) -> str | None:
    # A checkout that is not installed has none; its code is in the key
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _digest(value: Any) -> str:
    # File names that are no valid Unicode hold lone surrogates, which JSON's escapes keep and UTF-8 refuses
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
