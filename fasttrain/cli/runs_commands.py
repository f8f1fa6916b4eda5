"""Owns `runs`: the runs there are with their key figures, and what differs between two of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.figures import duration_text, one_line
from fasttrain.cli.printing import print_json, print_table
from fasttrain.errors import EXIT_DONE, RecipeError
from fasttrain.telemetry.strict_json import plain

if TYPE_CHECKING:
    from fasttrain.history.listing import Listed

runs_app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
_EPILOG = "Add --debug for a traceback."
_JSON = typer.Option("--json", help="One JSON document on stdout.")


@runs_app.command("list", epilog=_EPILOG)
def list_command(
    folder: Annotated[Path, typer.Argument(help="Where the runs lie.", metavar="[FOLDER]")] = Path("runs"),
    json: Annotated[bool, _JSON] = False,
) -> int:
    """List the runs in a folder, newest first, with their key figures; damaged ones are listed as that."""
    from fasttrain.history.listing import list_runs

    if not folder.is_dir():
        there = "is a file" if folder.exists() else "is not there"
        raise RecipeError(f"{folder} {there}, so that there are no runs to list; name the folder that holds them")
    runs = list_runs(folder)
    if json:
        print_json(plain({"folder": str(folder), "runs": [run.record() for run in runs]}))
    elif not runs:
        print(f"no runs in {folder}")
    else:
        header = ("run", "began", "recipe", "status", "best", "epochs", "patches/s", "hours", "USD", "machine")
        print_table([header, *(_row(run) for run in runs)])
    return EXIT_DONE


@runs_app.command("compare", epilog=_EPILOG)
def compare_command(
    a: Annotated[Path, typer.Argument(help="A run folder.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B")],
    png: Annotated[
        Path | None, typer.Option("--png", help="Where the curves of both are drawn; else compare-A-B.png here.")
    ] = None,
    json: Annotated[bool, _JSON] = False,
) -> int:
    """Show what differs between two runs in recipe, plan, machine and result, and draw the curves of both into one PNG."""
    from fasttrain.cli.compare_text import print_comparison
    from fasttrain.history.listing import is_run
    from fasttrain.run_folder import RunFolder
    from fasttrain.studies.comparing import compare, draw_comparison

    missing = [path for path in (a, b) if not is_run(RunFolder(path))]
    if missing:
        raise RecipeError([f"{path} holds no run; see `fasttrain runs list`" for path in missing])
    if a.resolve() == b.resolve():
        raise RecipeError(f"{a} and {b} are the same run; name two")
    comparison = compare(a, b)
    target = png if png is not None else Path(f"compare-{a.resolve().name}-{b.resolve().name}.png")
    drawn = draw_comparison(comparison, target)
    if json:
        print_json(plain({**comparison.record(), "png": None if drawn is None else str(drawn)}))
    else:
        print_comparison(comparison, drawn)
    return EXIT_DONE


def _row(run: Listed) -> tuple[str, ...]:
    from fasttrain.history.listing import told_briefly

    best = "–"
    if run.best is not None:
        metric, value, epoch = run.best
        unit = " Gy" if "dose" in metric else ""
        best = f"{value:.4f}{unit}" + (f" ({epoch})" if epoch else "")
    cells = (
        str(run.path),
        "–" if run.began is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)),
        run.recipe or "–",
        told_briefly(run),
        best,
        f"{run.epochs_done}/{run.epochs}" if run.epochs is not None else str(run.epochs_done or "–"),
        "–" if run.patches_per_second is None else f"{run.patches_per_second:.1f}",
        "–" if run.hours is None else duration_text(run.hours * 3600),
        "–" if run.cost is None else f"{run.cost:.2f}",
        run.machine or "–",
    )
    return tuple(one_line(cell) for cell in cells)
