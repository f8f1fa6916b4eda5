"""Owns files that fasttrain keeps for itself: opened so that a link, a pipe or a folder in their place does no harm."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_way(path: Path) -> None:
    """Removes what is no regular file from the place of one that is to be written: a link's target is another's, and a pipe has
    no end to wait for. Raises OSError where that cannot be done, as for a folder that is not empty.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        path.rmdir()
    elif not stat.S_ISREG(mode):
        path.unlink()


def read_regular(path: Path) -> bytes:
    """The content of a regular file; raises OSError for anything else, without waiting for it."""
    # A pipe is opened and left again at once, where `open` would wait for one who writes to it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        return stream.read()
