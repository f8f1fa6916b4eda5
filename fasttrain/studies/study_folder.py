"""Owns the folder that a profile or an ablation writes into: a new one, beside the runs where none is named, or one that the same
command was given before and did not come to the end of.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from fasttrain.errors import InUseError, RecipeError, StorageError
from fasttrain.run_paths import make_new_run_path
from fasttrain.whole_files import remove_left, told_free

UNFINISHED = ".unfinished"
"""Lies in the folder from the first to the last moment, and is locked by the process that is at work."""


class NewStudyFolder:
    """The folder for the time of a `with`; what ends without `finish` leaves it to the same command, or not at all if empty."""

    def __init__(self, asked: Path | None, name: str, command: str) -> None:
        """Makes `asked`, which must be new, empty or unfinished by `command`, or else ./runs/NAME-TIMESTAMP.

        Raises RecipeError where it holds something else, InUseError where another process is at work in it, StorageError where it
        cannot be made or written.
        """
        self._made = asked is None or not os.path.lexists(asked)
        self.path = make_new_run_path(name, option="--out") if asked is None else _made(asked, command)
        self._mark = self.path / UNFINISHED
        self._lock = self._claimed(command)
        self._finished = False

    def finish(self) -> None:
        """All is done and told: from now on the folder is not written into."""
        self._finished = True

    def __enter__(self) -> NewStudyFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            empty = os.listdir(self.path) == [UNFINISHED]
            if empty or self._finished:
                self._mark.unlink(missing_ok=True)
            if empty and self._made:
                self.path.rmdir()
        self._lock.close()

    def _claimed(self, command: str) -> IO[bytes]:
        lock = None
        try:
            lock = open(self._mark, "a+b", buffering=0)  # noqa: SIM115 - held to the end
            # A record lock, which no process inherits
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{command}\n".encode())
            for half in self.path.glob(".*.part"):
                remove_left(half)
        except OSError as error:
            if lock is not None:
                lock.close()
            if lock is not None and error.errno in (errno.EACCES, errno.EAGAIN):
                raise InUseError(
                    f"--out {self.path}: another {command} is at work there; wait for it, or name a new folder"
                ) from error
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}{told_free(self.path)}; choose another with --out"
            ) from error
        return lock


def _made(folder: Path, command: str) -> Path:
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"--out {folder}: is a file; name a new folder")
        if folder.is_dir() and any(folder.iterdir()) and not _unfinished(folder / UNFINISHED, command):
            raise RecipeError(f"--out {folder}: is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}; choose another with --out") from error
    return folder


def _unfinished(mark: Path, command: str) -> bool:
    """A mark that was cut short, as by a full disk, is anybody's."""
    return mark.is_file() and mark.read_text(encoding="utf-8", errors="replace").strip() in (command, "")
