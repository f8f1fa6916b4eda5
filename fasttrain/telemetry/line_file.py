"""Owns files that grow while a run goes on, and survive the process that writes them being killed and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fasttrain.errors import DISK_ERRORS, StorageError
from fasttrain.whole_files import ends_within_a_line

_MOST_BYTES_HELD = 16 << 20
"""What a disk may refuse before that is an error: days of a run's lines."""


class PatientFile:
    """A binary file open for writing; what is written is on its way to the disk at once, without a buffer.

    Where the disk takes nothing, or a part, the rest is held and goes out before what is written next, from the very byte at
    which it stopped. An error is raised where too much is held, and by `close` where the disk still takes none of it.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self._file = open(path, mode, buffering=0)  # noqa: SIM115 - closed by close()
        self._held = b""

    @property
    def closed(self) -> bool:
        """Whether it is."""
        return bool(self._file.closed)

    def fileno(self) -> int:
        """The system's number of it."""
        return int(self._file.fileno())

    def write(self, data: bytes) -> int:
        """Takes all of it. Raises OSError where the disk has refused too much."""
        self._held += data
        try:
            self._send()
        except OSError as error:
            if error.errno not in DISK_ERRORS or len(self._held) > _MOST_BYTES_HELD:
                raise
        return len(data)

    def flush(self) -> None:
        """There is no buffer."""

    def close(self) -> None:
        """Closes the file; may be called twice. Raises OSError where something had to be left out."""
        if self._file.closed:
            return
        try:
            self._send()
        finally:
            self._held = b""
            self._file.close()

    def _send(self) -> None:
        while self._held:
            self._held = self._held[os.write(self._file.fileno(), self._held) :]


class LineFile:
    """A text file open for appending; each line goes out in one write.

    An unfinished last line, left by a process that was killed, is ended first, so that it cannot swallow the next one. Lines that
    a full disk refuses are held and written later. Raises StorageError where the file cannot be written, or could not in the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = PatientFile(path, "ab")
            if ends_within_a_line(path):
                self._file.write(b"\n")
        except OSError as error:
            raise self._fault(error) from error

    def append(self, line: str) -> None:
        """Adds one line; nothing after `close`."""
        if self._file.closed:
            return
        try:
            self._file.write(f"{line}\n".encode())
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Closes the file; may be called twice."""
        try:
            self._file.close()
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        cure = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
        return StorageError(f"{self._path} cannot be written: {reason}; {cure} or choose another folder with --run")
