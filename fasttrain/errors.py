"""Owns every error a user can meet: one sentence (or a list of faults of one kind) and the exit code that goes with it."""

from __future__ import annotations

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


class DivergedError(FasttrainError):
    """Training produced non-finite losses for too long."""

    exit_code = EXIT_DIVERGED
