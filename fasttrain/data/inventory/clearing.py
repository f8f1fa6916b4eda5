"""Owns the freeing of space: what fasttrain stored is removed, and nothing else, and nothing that a process uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.inventory.sets import StoredSet, look_at, others_in, own_files
from fasttrain.machine.folder_lock import IN_USE, alone


@dataclass(frozen=True)
class Cleared:
    """What became of one set: `left` says in a few words why all or a part of it is still there, None where it is gone.

    It `failed` where the system did not let it be removed; a set in use is no failure. `freed_bytes` are those of the files
    removed; where a running process has a file mapped, the system gives its space back when that process ends. `others` files
    and folders, which fasttrain did not write, still lie in the folder.
    """

    stored: StoredSet
    freed_bytes: int
    left: str | None
    failed: bool = False
    others: int = 0


def clear(sets: Sequence[StoredSet]) -> list[Cleared]:
    """Removes each set that no process uses or has used since it was looked at."""
    return [_clear(stored) for stored in sets]


def _clear(stored: StoredSet) -> Cleared:
    with alone(stored.path) as taken:
        if taken is not None:
            return Cleared(stored, 0, taken, taken != IN_USE)
        now = look_at(stored.kind, stored.path)
        if now is None:
            return Cleared(stored, 0, None)
        if now.last_used != stored.last_used:
            return Cleared(stored, 0, "it was used meanwhile")
        freed, failure = 0, None
        for path, seen in own_files(stored.kind, stored.path):
            try:
                path.unlink()
                freed += seen.st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = f"{path} cannot be removed ({error.strerror or error})"
        if stored.kind == "compiled":
            _drop_empty_folders(stored.path)
        return Cleared(stored, freed, failure, failure is not None, 0 if failure else others_in(stored.path))


def _drop_empty_folders(folder: Path) -> None:
    for inside, _, _ in os.walk(folder, topdown=False):
        if inside != str(folder):
            with contextlib.suppress(OSError):
                os.rmdir(inside)
