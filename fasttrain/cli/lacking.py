"""Owns what errors are told as that only show what the machine lacks: memory, files that may be open, a package's libraries.

It is loaded before the wall that asks for it, since behind a full table of files nothing can be loaded any more.
"""

from __future__ import annotations

import errno
import sys

from fasttrain.errors import EXIT_MACHINE, EXIT_OUT_OF_MEMORY, FasttrainError, MachineError, tells_of_open_files

_FEW_FILES = 64
"""Below which what libraries cannot open is told as that."""


def told_of_memory() -> str:
    """Of a program that the memory ran out in, whatever it was at."""
    on_finish = sys.modules.get("fasttrain.cli.on_finish")
    run = on_finish.ON_FINISH.run_folder if on_finish is not None else ""
    cure = "give it more, or end other programs"
    if run:
        return f"this machine ran out of memory; what the run has trained and saved lies in {run}; {cure}"
    return f"this machine has too little memory for fasttrain to begin; {cure}"


def told_of_import(error: ImportError) -> tuple[str, int]:
    """A sentence and an exit code for a package that is there and cannot be loaded: where a limit binds the memory (`ulimit -v`),
    that is what it lacks.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    what = f"{error.name or 'a package that fasttrain needs'} could not be loaded: {error}"
    if limit != resource.RLIM_INFINITY:
        return f"{what}; its memory is limited to {limit / 2**30:.2g} GiB (`ulimit -v`): raise that", EXIT_OUT_OF_MEMORY
    return f"{what}; install it anew (pip install --force-reinstall), or `fasttrain doctor` may say more", EXIT_MACHINE


def lacks_open_files(error: BaseException) -> bool:
    """Whether a file could not be opened since too many are."""
    if not isinstance(error, OSError):
        return False
    # tempfile tells a full table of files as a folder that is not there
    by_tempfile = (
        error.filename is None and "temporary directory" in str(error) and (_limit() or _FEW_FILES) < _FEW_FILES
    )
    return error.errno in (errno.EMFILE, errno.ENFILE) or by_tempfile


def told_of_open_files() -> str:
    """Names the limit, where that can still be asked for."""
    limit = _limit()
    which = "" if limit is None else f": the limit is {limit}"
    return f"too many files are open{which}; raise it (`ulimit -n 4096`), or lower data.workers"


def as_open_files(error: FasttrainError) -> FasttrainError:
    """Files that could not be read since too many were open are no fault of the files."""
    return MachineError(told_of_open_files()) if any(map(tells_of_open_files, error.faults)) else error


def _limit() -> int | None:
    try:
        from fasttrain.machine.open_files import open_file_limit
    except (ImportError, OSError):
        return None
    return open_file_limit()
