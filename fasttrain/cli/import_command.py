"""Owns `data import`: a set in its own layout, made into files that are smaller and read faster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fasttrain.cli.printing import print_json, tell
from fasttrain.errors import EXIT_DONE

import_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make a set into files that are read faster."
)


@import_app.callback()
def _group() -> None:
    """Make a set in its own layout into files that are smaller and read faster."""


@import_app.command("openkbp", epilog="Add --debug for a traceback.")
def import_openkbp_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of OpenKBP: train-pats and the like, or patients.", metavar="SRC")
    ],
    target: Annotated[Path, typer.Argument(help="Folder for one file a patient, in the same parts.", metavar="DST")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write patients that are there already anew.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Make OpenKBP's CSV files into one compressed file a patient, without loss.

    `data.source: {kind: openkbp}` reads both; these are an eighth in size. A file that is there already is kept where it holds
    the same; where it does not, the command says so and ends with 3.
    """
    from fasttrain.data.openkbp_import import import_openkbp
    from fasttrain.wording import counted, size_in_memory

    def told(done: int, total: int, name: str) -> None:
        if sys.stderr.isatty() or done == total:
            tell(f"{done} of {total} patients, {name}")

    done = import_openkbp(source, target, overwrite, told)
    document: dict[str, Any] = {
        "folder": str(target),
        "written": [str(path) for path in done.written],
        "kept": [str(path) for path in done.kept],
        "csv_bytes": done.csv_bytes,
        "compact_bytes": done.compact_bytes,
        "kept_in_memory_bytes": done.volume_bytes,
    }
    if json:
        print_json(document)
        return EXIT_DONE
    print(target)
    held = len(done.written) + len(done.kept)
    tell(
        f"fasttrain: {counted(held, 'patient')} ({len(done.written)} written, {len(done.kept)} there already): "
        f"{size_in_memory(done.csv_bytes)} of CSV became {size_in_memory(done.compact_bytes)}; in memory they take "
        f"{size_in_memory(done.volume_bytes)} with data.storage_dtype: float16"
    )
    return EXIT_DONE
