"""Owns a text file that grows by whole lines and survives the process that writes it being killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TextIO

from fasttrain.errors import StorageError


class LineFile:
    """A file open for appending; each line goes out in one write and is flushed.

    An unfinished last line, left by a process that was killed, is ended first, so that it cannot swallow the next one.
    Raises StorageError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", newline="\n")
            if _ends_torn(path):
                self._file.write("\n")
        except OSError as error:
            raise self._fault(error) from error

    def append(self, line: str) -> None:
        """Adds one line; nothing after `close`. Raises StorageError where the disk refuses it."""
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Closes the file; may be called twice."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # closing flushes what a full disk has refused before
                raise self._fault(error) from error

    def _fault(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        cure = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
        return StorageError(f"{self._path} cannot be written: {reason}; {cure} or choose another folder with --run")


def _ends_torn(path: Path) -> bool:
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
