"""Owns the live view of a run that another process trains: the same lines as `monitor --once`, redrawn in place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain.cli.monitor_text import lines_of
from fasttrain.history.watching import Watch

_COLOURS = {"running": "green", "done": "green", "killed": "red", "failed": "red", "stopped": "yellow"}


def watch_live(watch: Watch, every: float, at_work: Sequence[str]) -> None:
    """Draws until the run is no longer `at_work`; the last picture stays. Ctrl-C leaves the terminal as it was."""
    console = Console(file=sys.stdout, force_terminal=True, no_color=bool(os.environ.get("NO_COLOR")), highlight=False)
    now = watch.read()
    with Live(drawn(now), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        live.refresh()
        while now["status"] in at_work:
            time.sleep(every)
            now = watch.read()
            live.update(drawn(now), refresh=True)


def drawn(now: dict[str, Any]) -> RenderableType:
    """The figures, and a bar of the steps where their number is known."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for subject, line in lines_of(now):
        # Text, not markup: a path or a class may hold square brackets
        table.add_row(Text(subject), Text(line, style=_style(subject, now)))
    if not now["steps"] or now["step"] is None:
        return table
    bar = ProgressBar(total=now["steps"], completed=min(now["step"], now["steps"]))
    return Group(table, bar)


def _style(subject: str, now: dict[str, Any]) -> str:
    if subject == "status":
        return _COLOURS.get(now["status"], "yellow")
    return "yellow" if subject in ("warning", "damaged") else "bold" if subject == "best" else ""
