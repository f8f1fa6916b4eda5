"""Owns `export`: a run's network as a file for other programs."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fasttrain.cli.interruption import unwinding
from fasttrain.cli.printing import print_json, tell
from fasttrain.cli.views import open_view
from fasttrain.errors import EXIT_DONE
from fasttrain.telemetry.events import Message


class ExportFormat(str, Enum):
    """What the network is written as."""

    bundle = "bundle"
    torchscript = "torchscript"
    onnx = "onnx"
    exported = "exported"


def export_command(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    format: Annotated[
        ExportFormat,
        typer.Option("--format", help="A folder for monai.bundle, TorchScript, ONNX, or torch.export's file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File or bundle folder; else RUN/export/bundle, model.ts, model.onnx, model.pt2."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the data set, for the check; else where the run found it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write an export that is there already anew.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Write a run's network as a MONAI bundle, TorchScript, ONNX or torch.export, each checked on a real case.

    It is the network of the recipe in float32 (no fused layers), with the weights that the run is scored with. Its answers to
    windows of a validation case have to agree with the run's to 1e-3 of the largest logit, else nothing is left behind. A bundle
    is also verified and run by monai.bundle on that case, and its label map has to be the one that `predict` writes.
    """
    view = open_view(sys.stderr)
    # An export that is there would be refused if the command that made it had ended by a signal and was given again
    with unwinding() as made:
        try:
            from fasttrain.delivery.export import export

            done = export(run, format.value, out, data, overwrite, lambda text: view.on_event(Message(text)), made)
        finally:
            view.close()
        if json:
            print_json(
                {
                    "run": str(run),
                    "format": done.format,
                    "path": str(done.path),
                    "epoch": done.epoch,
                    "checkpoint": str(done.checkpoint),
                    "checked_on": done.case,
                    "largest_difference": done.difference,
                    "answer": done.answer,
                }
            )
        else:
            print(done.path)
            tell(
                f"checked on {done.case}: differs from the network by {done.difference:.1e} of the largest logit\n"
                f"it answers {done.answer}"
            )
        sys.stdout.flush()
    return EXIT_DONE
