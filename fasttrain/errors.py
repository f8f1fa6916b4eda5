"""Owns every error a user can meet: one sentence (or a list of faults of one kind) and the exit code that goes with it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_DATA = 3
EXIT_MACHINE = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_STORAGE = 6
EXIT_DIVERGED = 7
EXIT_INTERRUPTED = 130
EXIT_LOST_RANK = 137
EXIT_TERMINATED = 143


class FasttrainError(Exception):
    """A fault with a known cause; `faults` are all faults of that kind found in one pass, each one sentence.

    A sentence names the file, key and value found, what was expected, and the command or setting that mends it.
    """

    exit_code = EXIT_BUG

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.faults,)


class RecipeError(FasttrainError):
    """The command line or the recipe asks for something that cannot be done."""

    exit_code = EXIT_USAGE


class DataError(FasttrainError):
    """A file of the data set is missing, unreadable or not what the recipe says."""

    exit_code = EXIT_DATA


class MachineError(FasttrainError):
    """The device, the environment or an optional dependency is missing."""

    exit_code = EXIT_MACHINE


class OutOfMemoryError(FasttrainError):
    """The device or the host has too little memory for what was asked."""

    exit_code = EXIT_OUT_OF_MEMORY


class StorageError(FasttrainError):
    """A run folder, checkpoint or disk cannot be written or read."""

    exit_code = EXIT_STORAGE


class InUseError(StorageError):
    """Another process is at work there, so that nothing has ended."""


class DivergedError(FasttrainError):
    """Training produced non-finite losses for too long."""

    exit_code = EXIT_DIVERGED


class LostRankError(FasttrainError):
    """A process that trained together with this one was killed, is frozen, or cannot be reached."""

    exit_code = EXIT_LOST_RANK
    silent = False
    """Whether it is not known to have ended."""


class OtherRankError(FasttrainError):
    """What ended another of the processes that train together; the exit code is the one that it ended with."""

    def __init__(self, faults: str | Iterable[str], exit_code: int) -> None:
        super().__init__(faults)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...], int]]:  # type: ignore[override]
        return type(self), (self.faults, self.exit_code)


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_NO_MEMORY_TEXTS = (
    "can't start new thread",
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
)


# How torch's allocators and libraries tell it; only CUDA's own has a type
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|bad_alloc|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    # What oneDNN says of it; of a layer that it does not know it says more
    r"|\Acould not create a (primitive|memory object)\Z",
    re.IGNORECASE,
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or of the interpreter is one of the many forms of memory that ran out: CUDA's (which torch has a
    type for, a kind of RuntimeError), cuBLAS's and cuDNN's, C++'s, that of torch's CPU allocator, and Python's.
    """
    if isinstance(error, FasttrainError):
        return False
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def wants_memory(error: BaseException) -> bool:
    """Whether an error that is none of ours says that the system gave no memory, in whichever form the interpreter has for it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, SystemError):
        # The interpreter's own word for a call that failed without saying why, as allocations do
        return "without exception set" in str(error) or "returned NULL without setting" in str(error)
    return any(text in str(error).lower() for text in _NO_MEMORY_TEXTS)


def tells_of_open_files(text: str) -> bool:
    """Whether a sentence about a file only says that too many are open, in this process or on this machine."""
    return any(os.strerror(number) in text for number in (errno.EMFILE, errno.ENFILE))


def exit_code_of(error: BaseException) -> int:
    """The exit code of the command line, of any error."""
    if isinstance(error, FasttrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return EXIT_STORAGE
    return EXIT_OUT_OF_MEMORY if wants_memory(error) else EXIT_BUG
