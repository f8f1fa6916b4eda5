"""Owns what a fetch shows on stderr: a bar on a terminal, plain lines with a sign of life everywhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from fasttrain.cli.figures import one_line
from fasttrain.cli.plain_view import PlainView
from fasttrain.telemetry import events

_MIB = 1 << 20
# A lost terminal answers EIO, a closed stream ValueError, and rich makes SystemExit of a broken pipe
_GONE = (OSError, ValueError, SystemExit)


class FetchView(Protocol):
    """A `fasttrain.data.fetch.Watcher` that is closed in the end."""

    def say(self, sentence: str) -> None:
        """Prints one sentence."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Shows `done` of `total` bytes of the work called `what`."""

    def close(self) -> None:
        """Ends the view; may be called twice."""


def open_fetch_view(stderr: TextIO, environ: Mapping[str, str] | None = None) -> FetchView:
    """A bar where `stderr` is a terminal that can move its cursor, else plain lines. The caller closes the view."""
    environ = os.environ if environ is None else environ
    if not stderr.isatty() or environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return PlainFetchView(stderr)
    no_colour = bool(environ.get("NO_COLOR"))
    return BarFetchView(Console(file=stderr, force_terminal=True, no_color=no_colour, highlight=False))


class PlainFetchView:
    """Flushed lines, and one at least every `heartbeat_seconds`; a stream that has gone away silences it."""

    def __init__(self, stream: TextIO, heartbeat_seconds: float = 30.0) -> None:
        self._view = PlainView(stream, heartbeat_seconds)

    def say(self, sentence: str) -> None:
        """Prints one sentence."""
        self._view.on_event(events.Message(sentence))

    def advance(self, what: str, done: int, total: int) -> None:
        """Keeps the figures for the next sign of life."""
        self._view.on_event(events.Progress(f"{what}, MiB", done // _MIB, -(-total // _MIB)))

    def close(self) -> None:
        """Stops the sign of life."""
        self._view.close()


class BarFetchView:
    """One bar with bytes, speed and time left; sentences above it. A terminal that has gone away silences it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            redirect_stdout=False,
        )
        self._task: TaskID | None = None
        self._what, self._done = "", 0
        self._silent = False
        self._attempt(self._bar.start)

    def say(self, sentence: str) -> None:
        """Prints one sentence above the bar."""
        # Text, not markup: a file name may hold square brackets
        self._attempt(lambda: self._console.print(Text(one_line(sentence))))

    def advance(self, what: str, done: int, total: int) -> None:
        """Moves the bar; other work, or work that starts over, gets a bar of its own, so that its speed is right."""
        self._attempt(lambda: self._move(what, done, total))

    def _move(self, what: str, done: int, total: int) -> None:
        if self._task is None or what != self._what or done < self._done:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(one_line(what), total=total, completed=done)
            self._what = what
        else:
            self._bar.update(self._task, completed=done, total=total)
        self._done = done

    def close(self) -> None:
        """Ends the drawing and gives the terminal back with its cursor."""
        with contextlib.suppress(*_GONE):
            self._bar.stop()
        with contextlib.suppress(*_GONE):
            self._console.show_cursor(True)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._silent:
            return
        try:
            action()
        except _GONE:
            self._silent = True
