"""Owns the memory of facts: one file a data set in fasttrain's cache folder, by path, size, time of change and code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.checking.facts import FileFacts, View
from fasttrain.data.volume_files import dicom_versions, files_of
from fasttrain.errors import StorageError
from fasttrain.machine.own_files import read_regular
from fasttrain.samples import Drawn
from fasttrain.whole_files import write_whole

_FORMAT = "fasttrain check 1"
_ODD = re.compile(r"[^\w.-]+")


class Remembered:
    """The facts of the files of one data set; threads may ask and note at the same time.

    A file counts as unchanged where its size and both its times of change in nanoseconds are those that it was read with. What
    was remembered by other code, was cut off, altered or written by something else is not remembered.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        root = root.resolve()
        name = _ODD.sub("_", root.name)[:60] or "data"
        self.path = folder / "checks" / f"{name}-{_digest(os.fsencode(root))[:16]}.json"
        self._files: dict[str, dict[str, Any]] = _load(self.path)
        self._changed = False

    def facts(self, path: Path, view: View) -> FileFacts | None:
        """What is remembered of a file as it lies there now."""
        entry = self._files.get(_name(path))
        if entry is None or entry["stamp"] != stamp_of(path, view.drawn) or view.key not in entry["facts"]:
            return None
        try:
            facts = FileFacts.of_record(entry["facts"][view.key])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        # A sentence names the file as it was given then
        return None if facts.faults and entry["given"] != str(path) else facts

    def note(self, path: Path, view: View, stamp: list[int] | None, facts: FileFacts) -> None:
        """Keeps facts; `stamp` is that of the file before it was read, and a file that changed meanwhile is not kept.

        Nor is one that could not be decoded: a disk that failed, or too many open files, may be mended without a change of it.
        """
        if not facts.decoded or stamp is None or stamp != stamp_of(path, view.drawn):
            return
        entry = self._files.get(_name(path))
        if entry is None or entry["stamp"] != stamp:
            entry = {"stamp": stamp, "given": str(path), "facts": {}}
            self._files[_name(path)] = entry
        entry["given"] = str(path)
        entry["facts"][view.key] = facts.record()
        self._changed = True

    def save(self) -> str | None:
        """Writes what is new, whole or not at all; one sentence where that cannot be done, which is no reason to stop."""
        if not self._changed:
            return None
        there = {name: entry for name, entry in self._files.items() if os.path.exists(name)}
        body = json.dumps(there, separators=(",", ":")).encode()
        head = json.dumps({"format": _FORMAT, "code": _code(), "digest": _digest(body)}).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(self.path) as stream:
                stream.write(head + b"\n" + body)
        except (OSError, StorageError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            return (
                f"what the check found is not remembered, since {self.path.parent} cannot be written ({reason}); "
                "set $FASTTRAIN_CACHE to a folder that can"
            )
        self._changed = False
        return None


def stamp_of(path: Path, drawn: Drawn | None = None) -> list[int] | None:
    """Size, time of change and time of change of the file's own record; None where it cannot be looked at.

    Where the voxels depend on several files, as those of a DICOM series do, of each of them, with the digest of their names.
    """
    try:
        files = files_of(path, drawn)
        seen = [os.stat(file) for file in files]
    except OSError:
        return None
    # The last one cannot be set, as `touch`, `cp -p` and tar set the time of change
    stamp = [one for found in seen for one in (found.st_size, found.st_mtime_ns, found.st_ctime_ns)]
    if files == (path,):
        return stamp
    names = _digest("\n".join(map(_name, files)).encode(errors="surrogateescape"))
    return [sum(stamp[::3]), int(names[:15], 16), int(_digest(repr(stamp).encode())[:15], 16)]


def _load(path: Path) -> dict[str, dict[str, Any]]:
    """The digest of the body is compared before anything in it is relied on."""
    try:
        head, _, body = read_regular(path).partition(b"\n")
        known = json.loads(head)
        sound = known == {"format": _FORMAT, "code": _code(), "digest": _digest(body)}
        return {name: entry for name, entry in dict(json.loads(body)).items() if _is_entry(entry)} if sound else {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _is_entry(entry: Any) -> bool:
    """The digest shows that nothing was altered by accident, not that fasttrain wrote it."""
    kinds = {"stamp": list, "given": str, "facts": dict}
    return isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())


def _name(path: Path) -> str:
    return os.path.abspath(path)


def _digest(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Of all that may decide what a file shows: the modules beside those that read it, and the libraries under them."""
    here = Path(__file__).parent
    readers = (*here.parent.glob("*.py"), *here.parent.glob("dicom/*.py"), *here.glob("*.py"))
    sources = [_digest(path.read_bytes()) for path in sorted(readers)]
    return _digest("\n".join([version("nibabel"), np.__version__, repr(dicom_versions()), *sources]).encode())
