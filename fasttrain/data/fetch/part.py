"""Owns an archive that is not all here yet, and the note beside it of which file it is a part of."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from fasttrain.data.fetch.http import Identity
from fasttrain.errors import StorageError
from fasttrain.whole_files import write_json

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Part:
    """The file `path` and its note `path`.json, which outlive the process that was killed.

    The note is written before the first byte: a part without one, or for another checksum, is begun anew. Losing what a
    crash of the machine left unwritten is no matter, for the checksum is taken from the file at the end.
    """

    def __init__(self, path: Path, md5: str) -> None:
        self.path = path
        self.identity: Identity | None = None
        self._note = path.with_name(path.name + ".json")
        self._md5 = md5
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            note = json.loads(self._note.read_text(encoding="utf-8"))
            size, tags = note["size"], (note["etag"], note["last_modified"])
            if note["md5"] == md5 and isinstance(size, int | None) and all(isinstance(tag, str | None) for tag in tags):
                self.identity = Identity(*tags, size)

    @property
    def size(self) -> int:
        """Bytes that are here, whatever file they are of."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def start(self) -> int:
        """The byte that a download can go on from; 0 where nothing here is known to fit."""
        identity = self.identity
        if identity is None or (identity.validator is None and identity.size is None):
            return 0
        size = self.size
        return size if identity.size is None or size <= identity.size else 0

    @property
    def whole(self) -> bool:
        """Whether all bytes are here, right or wrong."""
        return self.identity is not None and self.identity.size is not None and self.identity.size == self.size

    def begin(self, identity: Identity) -> None:
        """Empties the part and notes which file it will be of. Raises StorageError."""
        with self._sentences():
            self._note.unlink(missing_ok=True)
            self.path.write_bytes(b"")
        write_json(self._note, {"md5": self._md5, **asdict(identity)})
        self.identity = identity

    @contextlib.contextmanager
    def appending(self) -> Iterator[FileIO]:
        """The file, open for more, unbuffered so that its size is what is here; errors of the disk become StorageError."""
        with self._sentences(), open(self.path, "ab", buffering=0) as stream:
            yield stream

    def remove(self) -> None:
        """Removes the file and its note, if they are there."""
        for path in (self.path, self._note):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.identity = None

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StorageError(
                    f"the disk is full: {self.path} ends after {self.size} bytes, which are kept; "
                    "free space and run it again to go on, or name a folder on another disk with --to"
                ) from error
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror or error}; name another folder with --to"
            ) from error


def write_all(stream: FileIO, block: bytes) -> None:
    """Writes every byte: an unbuffered file may take a part and say so only in its return value."""
    rest = memoryview(block)
    while rest:
        rest = rest[stream.write(rest) :]
