"""Owns `predict`, and what it shares with `evaluate`: how a trained run is opened and told of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrain.cli.printing import print_json, tell
from fasttrain.cli.run_commands import DeviceOption, JsonOption
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.errors import EXIT_DATA, EXIT_DONE, RecipeError
from fasttrain.telemetry.events import Message, Observer, Progress
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.delivery.trained import TrainedRun
    from fasttrain.engine.stop import StopRequest

RunArgument = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]
MirrorOption = Annotated[
    str | None,
    typer.Option(
        "--mirror", metavar="AXES", help="Average over flips of these axes: 0,1,2 or none; else as the recipe says."
    ),
]


def predict_command(
    run: RunArgument,
    given: Annotated[Path, typer.Argument(help="A NIfTI file, or a folder of cases.", metavar="IN")],
    target: Annotated[
        Path, typer.Argument(help="Folder for the label maps; or a .nii.gz for one case.", metavar="OUT")
    ],
    device: DeviceOption = "auto",
    mirror: MirrorOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write predictions that are there already anew.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Write a label map for every volume, on its own grid and with the recipe's label values.

    IN is named as the run's training images were. A run with one file a channel (data.source nnunet, or folders with several
    image_suffixes) takes CASE_0000.nii.gz, CASE_0001.nii.gz … or CASE with those suffixes; one file of a case stands for all.
    A run with one file a case takes every NIfTI file that ends in its image suffix, but for those that end in its label_suffix.
    A run on DICOM takes a folder of slices, a folder of such folders, or one slice, which stands for its series.
    The prediction of a case is called CASE.nii.gz.
    A run with task: dose takes OpenKBP patients, and writes CASE.csv as the challenge takes it and CASE.nii.gz, in Gy.
    """
    view = open_view(sys.stderr)
    with stop_on_signals() as stop:
        from fasttrain.delivery import predict
        from fasttrain.engine.stop import Stopped

        try:
            trained = opened(run, device, mirror, view)
            stop.begun = True
            told = telling(view, "predicting", stop)
            warn = lambda text: view.on_event(Message(text, "warning"))  # noqa: E731
            done = predict(trained, given, target, told, stop, overwrite, told, warn)
        except Stopped:
            goes_on = "the same command begins anew" if overwrite else "the same command goes on"
            return say_stopped(stop, f"predictions that are done are kept, and {goes_on}")
        finally:
            view.close()
    if json:
        parts = {
            "written": done.written,
            "skipped": done.skipped,
            "passed_over": done.passed_over,
            "labels": done.labels,
        }
        print_json(
            {**{name: [str(path) for path in paths] for name, paths in parts.items()}, "faults": list(done.faults)}
        )
    else:
        for path in done.written:
            print(path)
    if done.skipped:
        them = "it is" if len(done.skipped) == 1 else "they are"
        tell(
            f"{counted(len(done.skipped), 'prediction')} skipped, since {them} done and unchanged; --overwrite makes them anew"
        )
    for fault in done.faults:
        tell(f"fasttrain: {fault}")
    return EXIT_DATA if done.faults else EXIT_DONE


def opened(run: Path, device: str, mirror: str | None, view: Observer) -> TrainedRun:
    """The run with its best weights, of which the view is told."""
    from fasttrain.delivery import mirrored, open_run

    axes = None if mirror is None else mirror_axes(mirror)
    trained = open_run(run, device, view.on_event)
    for sentence in trained.warnings:
        view.on_event(Message(sentence, "warning"))
    view.on_event(Message(trained.weights))
    return trained if axes is None else mirrored(trained, axes)


def mirror_axes(text: str) -> tuple[int, ...]:
    """The axes of `0,2`; none of `none`. Raises RecipeError for anything else."""
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise RecipeError(f"--mirror takes axes of a patch such as 0,1,2, or none; found {text!r}")
    return tuple(map(int, parts))


def telling(view: Observer, what: str, stop: StopRequest) -> Any:
    """What tells the view how far it is, and hears of a stop."""

    def progress(done: int, total: int, within: str = "") -> None:
        view.on_event(Progress(what, done, total, within))
        stop.check()

    return progress


def origin(trained: TrainedRun) -> dict[str, Any]:
    """Where the weights come from, for a document."""
    return {"run": str(trained.folder.path), "checkpoint": str(trained.checkpoint), "epoch": trained.epoch}
