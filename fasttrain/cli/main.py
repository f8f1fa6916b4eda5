"""Owns where the command line begins and ends, and the one wall where errors become sentences and exit codes.

Before `run` little is loaded, since signals are answered from there on; what it takes to run a command is loaded behind the wall.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from fasttrain.cli.interruption import Unwound, end_on_signals, end_with, raise_on_ctrl_c
from fasttrain.cli.lacking import as_open_files, lacks_open_files, told_of_import, told_of_memory, told_of_open_files
from fasttrain.errors import (
    DISK_ERRORS,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_OUT_OF_MEMORY,
    EXIT_STORAGE,
    FasttrainError,
    InUseError,
    wants_memory,
)

TYPE_CHECKING = False  # typing's own would have to be loaded
if TYPE_CHECKING:
    from typing import IO, Any

_PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_EXIT_BROKEN_PIPE = 128 + 13
"""What a shell makes of SIGPIPE, by which other programs end here."""


def run(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    Without `arguments` they are those of the process, which then answers signals as a command does, to its very end.
    """
    alone = arguments is None
    if alone:
        end_on_signals()
    # A stream that the shell closed (`>&-`) is None
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows ASCII alone gets \\xd7 for ×, not a failure
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    code = _guarded([text for text in given if text != "--debug"], debug)
    if alone:
        end_with(code)
    for stream in (sys.stdout, sys.stderr):
        # What is left in a stream that cannot be written would make the interpreter exit with 120 instead
        try:
            stream.flush()
        except (OSError, ValueError):
            _silence(stream)
    met = _leave_others(code, failed=True)
    _finish(code, alone, given)
    code = _told_to_loop(code)
    if met and alone:
        # What other ranks left open would be waited for, and NCCL's communicators for steps that were recorded with them
        os._exit(code)
    sys.exit(code)


def _told_to_loop(code: int) -> int:
    """The exit code, or what a loop around the command (scripts/keep_training.sh) wants to be told where another process is at
    work on the run: nothing has ended then.
    """
    wanted = os.environ.get("FASTTRAIN_EXIT_IN_USE", "")
    on_finish = sys.modules.get("fasttrain.cli.on_finish")
    in_use = code != 0 and on_finish is not None and on_finish.ON_FINISH.in_use
    return int(wanted) if in_use and wanted.isdecimal() and len(wanted) <= 3 else code


def _leave_others(code: int, failed: bool) -> bool:
    """Of several ranks; once. Whether there are any."""
    several = _several()
    if several is None:
        return False
    several.leave(code, failed)
    return not several.alone


def _several() -> Any:
    """The part of this command among several ranks, where it has come as far as to know of it."""
    module = sys.modules.get("fasttrain.cli.several")
    return module.SEVERAL if module is not None else None


def _ended_by_another(error: FasttrainError, arguments: list[str]) -> None:
    """Another rank's failure ends this command, whose main thread may wait for ever."""
    for fault in error.faults:
        _tell(fault)
    if "--json" in arguments:
        _document_failure(error)


def _finish(code: int, alone: bool, given: list[str]) -> None:
    """What `--on-finish` asks for, last of all, since it may be what takes the machine away."""
    several = _several()
    if several is not None and several.follows:
        return
    late = code and any(text.partition("=")[0] == "--on-finish" for text in given)
    # A command that has the option has loaded it, unless its options were refused
    if not late and "fasttrain.cli.on_finish" not in sys.modules:
        return
    try:
        from fasttrain.cli.on_finish import ON_FINISH
    except Exception as error:
        # What ended the command may be what is in its way, too
        _tell(f"--on-finish could not be run: {str(error) or type(error).__name__}")
        return
    if alone:
        end_with(code, ON_FINISH.end_command)
        raise_on_ctrl_c()
    if late:
        ON_FINISH.ask_for([text for text in given if text != "--debug"])
    ON_FINISH.carry_out(code)
    if alone:
        end_with(code)


def _guarded(arguments: list[str], debug: bool) -> int:
    try:
        from fasttrain.cli.commands import tree
        from fasttrain.cli.several import SEVERAL

        SEVERAL.begin(arguments)
        SEVERAL.end_here = lambda error: _ended_by_another(error, arguments)
        result: Any = tree()(arguments, prog_name="fasttrain", standalone_mode=False)
        sys.stdout.flush()  # here and not when the interpreter ends, where an error could no longer become a sentence
        code = result if isinstance(result, int) else 0
        _leave_others(code, failed=False)
        return code
    except FasttrainError as error:
        if isinstance(error, InUseError):
            from fasttrain.cli.on_finish import ON_FINISH

            ON_FINISH.leave_out()
        if debug:
            _print_traceback()
        error = as_open_files(error)
        for fault in error.faults:
            _tell(fault)
        if "--json" in arguments:
            _document_failure(error)
        return error.exit_code
    except KeyboardInterrupt:
        _tell("interrupted")
        return EXIT_INTERRUPTED
    except Unwound as signalled:
        _tell(f"stopped by {signalled.name}")
        return signalled.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`… | head`): nothing to say, and nobody to say it to
        _drop_output()
        return _EXIT_BROKEN_PIPE
    except SystemExit as error:
        # The parser meets a reader that went away by itself, with a wrapper around stdout and exit code 1
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            _drop_output()
            return _EXIT_BROKEN_PIPE
        return error.code if isinstance(error.code, int) else EXIT_BUG
    except Exception as error:
        several = _several()
        lost = several.explain(error) if several is not None else None
        if lost is None:
            return _other(error, debug, arguments)
        _ended_by_another(lost, arguments)
        return int(lost.exit_code)


def _other(error: Exception, debug: bool, arguments: list[str]) -> int:
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if callable(message) and isinstance(code, int):
        # The command line parser's own errors: wrong options and the like
        _tell_usage(error, " ".join(message().split()), arguments)
        return code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        _drop_output()
        _tell(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
        return EXIT_STORAGE
    if wants_memory(error):
        if debug:
            _print_traceback()
        _tell(told_of_memory())
        return EXIT_OUT_OF_MEMORY
    if lacks_open_files(error):
        if debug:
            _print_traceback()
        _tell(told_of_open_files())
        return EXIT_MACHINE
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != "fasttrain":
        if debug:
            _print_traceback()
        text, code = told_of_import(error)
        _tell(text)
        return code
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and not debug:
        what = os.fsdecode(error.filename) if error.filename is not None else "the working folder"
        _tell(f"{what}: {(error.strerror or str(error)).lower()}; name another place, or mend this one")
        return EXIT_STORAGE
    if type(error).__name__ == "Abort":
        return EXIT_INTERRUPTED
    if debug:
        _print_traceback()
    _tell(f"a bug of fasttrain's own: {type(error).__name__}: {error}; run it again with --debug for the traceback")
    return EXIT_BUG


def _document_failure(error: FasttrainError) -> None:
    """A script that asked for a document gets one of a failure, too."""
    several = _several()
    if several is not None and several.leaves_word:
        return
    from fasttrain.cli.printing import print_json

    with contextlib.suppress(OSError, ValueError):
        print_json({"status": "failed", "exit_code": error.exit_code, "faults": list(error.faults)})
        sys.stdout.flush()


def _tell_usage(error: Any, message: str, arguments: list[str]) -> None:
    from fasttrain.cli.usage_hints import hint

    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "fasttrain"
    if message.startswith(("Usage:", where)) or not message:
        # A group without a command: its help is the answer
        _print_error(context.get_help() if context is not None else message)
        return
    text = message.rstrip(".").replace(". Did you mean", "; did you mean")
    if told := hint(message, arguments):
        text += f"; {told};"
    _tell(f"{text[0].lower()}{text[1:]}{'' if text.endswith(('?', ';')) else ';'} `{where} --help` shows what there is")


def _drop_output() -> None:
    _silence(sys.stdout)


def _silence(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(sentence: str) -> None:
    from fasttrain.cli.figures import one_line

    several = _several()
    if several is not None and several.keep(sentence):
        return
    # One line, whatever a file name, a key or a library's message holds
    _print_error(f"fasttrain: {one_line(sentence)}")


def _print_traceback() -> None:
    import traceback

    _print_error(traceback.format_exc())


def _print_error(text: str) -> None:
    # Where stderr is full or closed, the exit code is all that can still be told: it must not be lost as well
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
