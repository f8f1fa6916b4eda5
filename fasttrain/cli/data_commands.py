"""Owns `data` and its `data fetch`: a public data set, from its server to the folder that the recipes look in."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fasttrain.cli.cache_command import cache_command
from fasttrain.cli.import_command import import_app
from fasttrain.cli.printing import print_json, tell
from fasttrain.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.data.fetch import Fetched

_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGUSR1: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


_EPILOG = "Add --debug for a traceback."
data_app.command("cache", epilog=_EPILOG)(cache_command)
data_app.add_typer(import_app, name="import")


@data_app.command("fetch", epilog=_EPILOG)
def fetch_command(
    name: Annotated[str, typer.Argument(help="Set of the Medical Segmentation Decathlon.", metavar="NAME")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for the set; else $FASTTRAIN_DATA/NAME or ./data/NAME.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="https, http or file address of the archive, else MONAI's; one of your own needs --md5 too.",
            metavar="URL",
        ),
    ] = None,
    md5: Annotated[
        str | None, typer.Option("--md5", help="Checksum of the archive, else the one in MONAI's table.", metavar="HEX")
    ] = None,
    retries: Annotated[int, typer.Option("--retries", help="Tries after a lost connection.", min=0)] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds without a byte after which a connection is lost.", min=0.1)
    ] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Download spleen, hippocampus, heart or brain-tumor, check it and unpack it.

    What was downloaded is kept when the connection or the process ends: run it again to go on.
    """
    try:
        with _ended_by_signals():
            fetched = _fetched(name, to, address, md5, retries, timeout)
    except _Ended as ended:
        tell(f"fasttrain: stopped by {ended.what}; what was downloaded is kept, run the same command again to go on")
        return ended.code
    if json:
        print_json(_document(fetched))
    else:
        print(fetched.folder)
    return EXIT_DONE


def _fetched(name: str, to: Path | None, address: str | None, md5: str | None, retries: int, timeout: float) -> Fetched:
    from fasttrain.cli.fetch_view import open_fetch_view
    from fasttrain.data.fetch import Patience, fetch
    from fasttrain.data.fetch.catalogue import LICENCE, known_set
    from fasttrain.data.location import usual_folder

    known_set(name)
    target = to.expanduser() if to is not None else usual_folder(name, os.environ)[0]
    view = open_fetch_view(sys.stderr)
    try:
        fetched = fetch(name, target, view, address, md5, Patience(retries=retries, timeout_seconds=timeout))
        present = fetched.present
        if not fetched.already_there:
            view.say(
                f"{fetched.known.task}: {counted(present.cases, 'case')} with and {present.unlabelled} without a label, "
                f"in {fetched.folder} ({LICENCE})"
            )
        where = ["--data", str(to)] if to is not None else []
        view.say(f"train on it with: {shlex.join(['fasttrain', 'train', '--recipe', name, *where])}")
        return fetched
    finally:
        view.close()


def _document(fetched: Fetched) -> dict[str, Any]:
    return {
        "name": fetched.known.name,
        "task": fetched.known.task,
        "folder": str(fetched.folder),
        "cases": fetched.present.cases,
        "unlabelled_cases": fetched.present.unlabelled,
        "already_there": fetched.already_there,
        "address": fetched.address,
        "md5": fetched.md5,
        "archive_bytes": fetched.archive_bytes,
    }


class _Ended(BaseException):
    """A signal ends the fetch; no Exception, so that nothing on the way takes it for a fault of its own."""

    def __init__(self, number: int) -> None:
        self.code = _CODES[signal.Signals(number)]
        self.what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(self.what)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP raise `_Ended` wherever the fetch is, a second one ends the process at once."""

    def at_once(number: int, _: FrameType | None) -> NoReturn:
        os._exit(_CODES[signal.Signals(number)])

    def answer(number: int, _: FrameType | None) -> NoReturn:
        for one in former:
            signal.signal(one, at_once)
        raise _Ended(number)

    # A shell that runs a command with & has it ignore Ctrl-C, which is meant for what is in front
    former = {one: handler for one in _CODES if (handler := signal.getsignal(one)) is not signal.SIG_IGN}
    for one in former:
        signal.signal(one, answer)
    try:
        yield
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)
