"""Owns `report`: the page of a run, made anew from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrain.cli.printing import print_json
from fasttrain.errors import EXIT_DONE, RecipeError


def report_command(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option("--out", help="Another file than report.html in the run folder.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Write a run's report: one HTML file with its curves, plan, cases, machine and cost, that needs nothing else to be read."""
    from fasttrain.history.listing import is_run
    from fasttrain.history.report import write_report
    from fasttrain.run_folder import RunFolder

    folder = RunFolder(run)
    if not is_run(folder):
        raise RecipeError(f"{run} holds no run; name a run folder, or see `fasttrain runs list`")
    written = write_report(folder, out)
    if json:
        print_json({"run": str(run), "report": str(written), "bytes": written.stat().st_size})
    else:
        print(written)
    return EXIT_DONE
