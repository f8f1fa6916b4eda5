"""Owns which process a run folder is in the hands of, found out without taking its lock or disturbing it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from dataclasses import dataclass

from fasttrain.run_folder import RunFolder

_FLOCK = "hhqqi"
"""`struct flock` of 64-bit Linux: kind, whence, start, length, process."""
_TEXT = re.compile(r"process (\d+) on (.+)")


@dataclass(frozen=True)
class Holder:
    """A process, by its id on its host. Inside a container the id is the container's own."""

    process_id: int
    host: str

    @property
    def here(self) -> bool:
        """Whether the host is this one."""
        return self.host == os.uname().nodename

    def __str__(self) -> str:
        return f"process {self.process_id}" + ("" if self.here else f" on {self.host}")


def named_holder(folder: RunFolder) -> Holder | None:
    """The last process that claimed the folder, as `run.lock` names it, alive or not; None where there is none."""
    if folder.claimed_here():
        return Holder(os.getpid(), os.uname().nodename)
    with contextlib.suppress(OSError):
        text = folder.lock.read_text(encoding="utf-8", errors="replace")
        if (match := _TEXT.fullmatch(text.strip())) is not None:
            return Holder(int(match[1]), match[2])
    return None


def is_held(folder: RunFolder) -> bool:
    """Whether another process has claimed the folder and lives. A lock ends with its process, however that ended.

    False for this process's own claim: to look at that would end it.
    """
    if folder.claimed_here():
        return False
    with contextlib.suppress(OSError), folder.lock.open("rb") as file:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    return False
