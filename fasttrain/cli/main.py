"""Owns the command line as a whole: the commands, and the one wall where errors become sentences and exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from typing import IO, Any

import typer

from fasttrain.cli.check_command import check_command
from fasttrain.cli.data_commands import data_app
from fasttrain.cli.doctor_command import doctor_command
from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import print_json
from fasttrain.cli.recipe_commands import recipes_app
from fasttrain.cli.run_commands import resume_command, train_command
from fasttrain.cli.trained_commands import evaluate_command, predict_command
from fasttrain.cli.tune_commands import tune_batch_command, tune_command
from fasttrain.errors import (
    DISK_ERRORS,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_STORAGE,
    FasttrainError,
    wants_memory,
)

_PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_EXIT_BROKEN_PIPE = 128 + 13
"""What a shell makes of SIGPIPE, by which other programs end here."""

app = typer.Typer(
    name="fasttrain",
    help="Trains 3D and 2D medical-image networks as fast as the card allows, and says what holds a run back.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage or recipe, 3 data, 4 machine, 5 out of memory, 6 disk or checkpoint, 7 diverged, "
    "130 Ctrl-C, 143 told to stop, 1 a bug. Add --debug to any command for a traceback.",
)
_EPILOG = "Add --debug for a traceback."
app.command("train", epilog=_EPILOG)(train_command)
app.command("resume", epilog=_EPILOG)(resume_command)
app.command("tune-batch", epilog=_EPILOG)(tune_batch_command)
app.command("tune", epilog=_EPILOG)(tune_command)
app.command("check", epilog=_EPILOG)(check_command)
app.command("doctor", epilog=_EPILOG)(doctor_command)
app.command("evaluate", epilog=_EPILOG)(evaluate_command)
app.command("predict", epilog=_EPILOG)(predict_command)
app.add_typer(recipes_app, name="recipes", help="List, show, copy, validate and suggest recipes.")
app.add_typer(data_app, name="data", help="Fetch public data sets; show and clear what is stored.")


def _version(shown: bool) -> None:
    if shown:
        from fasttrain import __version__

        print(f"fasttrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    # A stream that the shell closed (`>&-`) is None
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows ASCII alone gets \\xd7 for ×, not a failure
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    code = _guarded([text for text in given if text != "--debug"], debug)
    for stream in (sys.stdout, sys.stderr):
        # What is left in a stream that cannot be written would make the interpreter exit with 120 instead
        try:
            stream.flush()
        except (OSError, ValueError):
            _silence(stream)
    sys.exit(code)


def _guarded(arguments: list[str], debug: bool) -> int:
    try:
        result: Any = app(arguments, prog_name="fasttrain", standalone_mode=False)
        sys.stdout.flush()  # here and not when the interpreter ends, where an error could no longer become a sentence
        return result if isinstance(result, int) else 0
    except FasttrainError as error:
        if debug:
            _print_error(traceback.format_exc())
        for fault in error.faults:
            _tell(fault)
        if "--json" in arguments:
            _document_failure(error)
        return error.exit_code
    except KeyboardInterrupt:
        _tell("interrupted")
        return EXIT_INTERRUPTED
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
        return _other(error, debug)


def _other(error: Exception, debug: bool) -> int:
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if callable(message) and isinstance(code, int):
        # The command line parser's own errors: wrong options and the like
        _tell_usage(error, " ".join(message().split()))
        return code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        _drop_output()
        _tell(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
        return EXIT_STORAGE
    if wants_memory(error):
        if debug:
            _print_error(traceback.format_exc())
        _tell("this machine has too little memory for fasttrain to begin; give it more, or end other programs")
        return EXIT_OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and not debug:
        what = os.fsdecode(error.filename) if error.filename is not None else "the working folder"
        _tell(f"{what}: {(error.strerror or str(error)).lower()}; name another place, or mend this one")
        return EXIT_STORAGE
    if type(error).__name__ == "Abort":
        return EXIT_INTERRUPTED
    if debug:
        _print_error(traceback.format_exc())
    _tell(f"a bug of fasttrain's own: {type(error).__name__}: {error}; run it again with --debug for the traceback")
    return EXIT_BUG


def _document_failure(error: FasttrainError) -> None:
    """A script that asked for a document gets one of a failure, too."""
    with contextlib.suppress(OSError, ValueError):
        print_json({"status": "failed", "exit_code": error.exit_code, "faults": list(error.faults)})
        sys.stdout.flush()


def _tell_usage(error: Any, message: str) -> None:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "fasttrain"
    if message.startswith(("Usage:", where)) or not message:
        # A group without a command: its help is the answer
        _print_error(context.get_help() if context is not None else message)
        return
    text = message.rstrip(".").replace(". Did you mean", "; did you mean")
    _tell(f"{text[0].lower()}{text[1:]}{'' if text.endswith('?') else ';'} `{where} --help` shows what there is")


def _drop_output() -> None:
    _silence(sys.stdout)


def _silence(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(sentence: str) -> None:
    # One line, whatever a file name, a key or a library's message holds
    _print_error(f"fasttrain: {one_line(sentence)}")


def _print_error(text: str) -> None:
    # Where stderr is full or closed, the exit code is all that can still be told: it must not be lost as well
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
