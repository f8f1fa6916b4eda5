"""Owns the lock by which a folder of a cache that a process uses is told from one that only lies there.

The system drops such a lock with the process that held it, however that ended, so that none outlives a SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fasttrain.machine.own_files import make_way

IN_USE = "a running process uses it"
LOCK_FILE = "in-use.lock"
"""Lies in the folder itself, and is locked and never written."""


class Hold:
    """A share in the use of a folder, kept until `release` or the end of this process and of those forked from it."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._stream = stream

    def release(self) -> None:
        """Gives this process's share back; a second call does nothing."""
        if self._stream is not None:
            # Closed and not unlocked: that would end the share of forked processes as well
            self._stream.close()
            self._stream = None


def hold(folder: Path) -> Hold:
    """Waits while another process clears the folder, and makes it where that one removed it.

    Where no lock can be had (a read-only disk, a file system without locks) the hold is empty: nobody can clear there either.
    """
    while True:
        stream = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stream = _opened(folder)
            fcntl.flock(stream, fcntl.LOCK_SH)
        except OSError:
            if stream is not None:
                stream.close()
            return Hold(None)
        if os.fstat(stream.fileno()).st_nlink:
            return Hold(stream)
        stream.close()


def _opened(folder: Path) -> IO[bytes]:
    path = folder / LOCK_FILE
    make_way(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[str | None]:
    """A scope in which no process that asks by `hold` uses the folder; gives why it cannot be had, in a few words, or None.

    The lock's file is removed at the end of the scope, so that the folder may be; not that of a folder which took its place.
    """
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(_opened(folder))
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield IN_USE
            return
        except OSError as error:
            yield f"it cannot be locked ({error.strerror or error})"
            return
        try:
            yield None
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(folder / LOCK_FILE), os.fstat(stream.fileno())):
                    (folder / LOCK_FILE).unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
