"""Owns what a process remembers of files that it read: headers, and whole files from the check until the cache is filled.

A file is known by its path, size and times of change; what changed is another file.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Key = tuple[str, int, int, int]

_MOST_HEADERS = 1 << 14
_JUST_NOW_NS = 1_000_000_000


def key_of(path: Path) -> Key | None:
    """None for a file that cannot be looked at, and for one changed just now: its times might not tell of a further change."""
    try:
        seen = os.stat(path)
    except (OSError, ValueError):
        return None
    if abs(time.time_ns() - max(seen.st_mtime_ns, seen.st_ctime_ns)) < _JUST_NOW_NS:
        return None
    return os.fspath(path), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def key_of_all(name: str, paths: Iterable[Path]) -> Key | None:
    """The like for what several files hold together, under a name of its own."""
    keys = [key_of(path) for path in paths]
    if not keys or None in keys:
        return None
    whole = hashlib.blake2b(repr(keys).encode(errors="surrogateescape"), digest_size=16).digest()
    return name, len(keys), int.from_bytes(whole[:8], "big"), int.from_bytes(whole[8:], "big")


class SeenFiles:
    """Threads may ask and note at the same time."""

    def __init__(self) -> None:
        self._headers: dict[Key, Any] = {}
        self._files: dict[Key, tuple[Any, int]] = {}
        self._room = 0
        self._lock = threading.Lock()

    def header(self, key: Key | None) -> Any:
        """The header of an unchanged file; None where it is not known."""
        return None if key is None else self._headers.get(key)

    def note_header(self, key: Key | None, header: Any) -> None:
        """Remembers a header for good: a run looks at each several times before it begins."""
        if key is not None:
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            self._headers[key] = header

    def keep(self, room_bytes: int) -> None:
        """From now on whole files are kept for the next who reads them, as many as have room."""
        with self._lock:
            self._room = room_bytes

    @property
    def room_bytes(self) -> int:
        """For further whole files."""
        return self._room

    def has(self, key: Key | None) -> bool:
        """Whether the whole file is kept; it stays so."""
        return key in self._files

    def stop_keeping(self) -> None:
        """What was kept can still be taken."""
        with self._lock:
            self._room = 0

    def forget(self) -> None:
        """Gives the memory of whole files back."""
        with self._lock:
            self._room = 0
            self._files = {}

    def note_file(self, key: Key | None, file: Any, count: int) -> None:
        """Keeps a file of `count` bytes where files are kept and it has room."""
        if key is None:
            return
        with self._lock:
            if count <= self._room:
                self._room -= count
                self._files[key] = (file, count)

    def take(self, key: Key | None) -> Any:
        """The whole file, which is kept no longer; None where it was not kept or has changed."""
        if key is None or not self._files:
            return None
        with self._lock:
            found = self._files.pop(key, None)
        return None if found is None else found[0]


SEEN = SeenFiles()
"""Of this process."""
