"""Owns the choice of view: redrawn on a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from fasttrain.telemetry.events import Observer


def open_view(stderr: TextIO, environ: Mapping[str, str] | None = None) -> Observer:
    """A `LiveView` where `stderr` is a terminal that can move its cursor, else a `PlainView`.

    `TERM=dumb`, `unknown` or unset means that it cannot. `NO_COLOR` (any text, see no-color.org) keeps the live view
    without its colours. The caller closes the view.
    """
    environ = os.environ if environ is None else environ
    if not stderr.isatty() or environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        from fasttrain.cli.plain_view import PlainView

        return PlainView(stderr)
    from rich.console import Console

    from fasttrain.cli.live_view import LiveView

    # rich would let FORCE_COLOR and TTY_COMPATIBLE overrule what was just found out.
    console = Console(file=stderr, force_terminal=True, no_color=bool(environ.get("NO_COLOR")), highlight=False)
    return LiveView(console)
