"""Owns the list of what is stored: one set a folder, the files in it that fasttrain wrote, their size and their last use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.inventory.note import Note, read_note
from fasttrain.data.inventory.places import (
    CHECK_MAGIC,
    CHECK_NAME,
    DAMAGED_NAME,
    LMDB_DATA,
    LMDB_LOCK,
    LMDB_MAGIC,
    LMDB_MAGIC_AT,
    NOTE_FILE,
    PART_NAME,
    SET_NAME,
    VOLUME_MAGIC,
    VOLUME_NAME,
)
from fasttrain.machine.folder_lock import LOCK_FILE

VOLUME_KINDS = ("disk", "lmdb")
OTHER_KINDS = {"checks": "checks", "inductor": "compiled", "triton": "compiled"}
"""Folders beside `volumes` in fasttrain's cache folder, and what they hold."""


@dataclass(frozen=True)
class StoredSet:
    """`kind` is disk, lmdb, checks or compiled; `name` the folder's, for volumes the digest of the settings they were made with.

    `last_used` is in seconds since 1970. `entries` is None where it is not known without opening what is stored.
    """

    kind: str
    name: str
    path: Path
    bytes: int
    entries: int | None
    last_used: float
    note: Note | None


def find_sets(cache: Path | None, volumes: Path) -> list[StoredSet]:
    """What lies in the folder `volumes`, and in `cache` beside it; files and folders that are not fasttrain's are passed over."""
    places = [(kind, folder) for kind in VOLUME_KINDS for folder in _folders(volumes / kind)]
    places = [(kind, folder) for kind, folder in places if SET_NAME.fullmatch(folder.name) or _is_damaged(kind, folder)]
    if cache is not None:
        places += [(kind, cache / name) for name, kind in OTHER_KINDS.items()]
    return [found for kind, folder in places if (found := look_at(kind, folder)) is not None]


def look_at(kind: str, folder: Path) -> StoredSet | None:
    """The set in a folder; None where fasttrain has nothing there."""
    files = own_files(kind, folder)
    if not files:
        return None
    note = read_note(folder) if kind in VOLUME_KINDS else None
    if kind == "lmdb":
        entries = None if note is None else note.entries
    else:
        entries = sum(kind != "disk" or VOLUME_NAME.fullmatch(path.name) is not None for path, _ in files)
    noted = [seen.st_mtime for path, seen in files if path.name == NOTE_FILE and kind in VOLUME_KINDS]
    return StoredSet(
        kind=kind,
        name=folder.name,
        path=folder,
        bytes=sum(seen.st_size for _, seen in files),
        entries=entries,
        last_used=noted[0] if noted else max(seen.st_mtime for _, seen in files),
        note=note,
    )


def own_files(kind: str, folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files of a set that fasttrain wrote, or a library did at its word, but for the lock of the folder."""
    files = _files(folder, deep=kind == "compiled")
    return [(path, seen) for path, seen in files if path.name != LOCK_FILE and _is_own(kind, path)]


def others_in(folder: Path) -> int:
    """How many files and folders lie there."""
    with contextlib.suppress(OSError):
        return sum(path.name != LOCK_FILE for path in folder.iterdir())
    return 0


def _is_own(kind: str, path: Path) -> bool:
    if kind == "compiled":
        return True
    if kind == "checks":
        return CHECK_NAME.fullmatch(path.name) is not None and _begins_with(path, 0, (CHECK_MAGIC,))
    if path.name == NOTE_FILE:
        return read_note(path.parent) is not None
    if path.name.startswith(f".{NOTE_FILE}.") and path.name.endswith(".part"):
        return True
    if kind == "disk":
        if PART_NAME.fullmatch(path.name):
            return True
        return VOLUME_NAME.fullmatch(path.name) is not None and _begins_with(path, 0, (VOLUME_MAGIC,))
    if path.name == LMDB_LOCK:
        return True
    return path.name == LMDB_DATA and (_is_damaged(kind, path.parent) or _begins_with(path, LMDB_MAGIC_AT, LMDB_MAGIC))


def _is_damaged(kind: str, folder: Path) -> bool:
    return kind == "lmdb" and DAMAGED_NAME.fullmatch(folder.name) is not None


def _begins_with(path: Path, place: int, magics: tuple[bytes, ...]) -> bool:
    """Whether a magic number is there, or the file was cut before its end or holds zeros there, as a power cut leaves it."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(place + len(magics[0]))[place:]
    except OSError:
        return False
    return not head.strip(b"\0") or any(magic.startswith(head) for magic in magics)


def _folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return []


def _files(folder: Path, deep: bool) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files with what the system knows of them; links are not followed, and what goes meanwhile is passed over."""
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)
            elif deep and entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), deep)
