"""Owns `evaluate` and `predict`: what is done with a run that was trained."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrain.cli.figures import score_text
from fasttrain.cli.printing import print_json, print_table
from fasttrain.cli.run_commands import DeviceOption, JsonOption
from fasttrain.cli.signals import stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.errors import EXIT_DATA, EXIT_DONE
from fasttrain.telemetry.events import Message, Observer, Progress
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.delivery.trained import TrainedRun
    from fasttrain.engine.stop import StopRequest
    from fasttrain.engine.validating.validation import Scores

RunArgument = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]


class Part(str, Enum):
    """Which cases of the split are scored."""

    validation = "validation"
    test = "test"
    training = "training"


def evaluate_command(
    run: RunArgument,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the data set; else where the run found it.")
    ] = None,
    part: Annotated[Part, typer.Option("--part", help="Which cases of the run's split.")] = Part.validation,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> int:
    """Score a trained run on whole volumes, case by case."""
    view = open_view(sys.stderr)
    with stop_on_signals() as stop:
        from fasttrain.cli.dose_table import doses_document, print_doses
        from fasttrain.delivery import evaluate, open_run
        from fasttrain.engine.stop import Stopped
        from fasttrain.scoring import DoseScore, DoseSummary

        try:
            trained = _opened(open_run(run, device, view.on_event), view)
            stop.begun = True
            told = _told(view, "scoring", stop)
            warn = lambda text: view.on_event(Message(text, "warning"))  # noqa: E731
            scores = evaluate(trained, part.value, data, told, stop, told, warn)
        except Stopped:
            return stop.exit_code
        finally:
            view.close()
    names = trained.recipe.data.scored_names
    if isinstance(scores.summary, DoseSummary):
        doses = [score for score in scores.cases if isinstance(score, DoseScore)]
        if json:
            print_json({**_origin(trained), **doses_document(scores.summary, doses)})
        else:
            print_doses(scores.summary, doses, names)
    elif json:
        print_json(_document(trained, scores, names))
    else:
        _print_scores(scores, names)
    return EXIT_DONE


def predict_command(
    run: RunArgument,
    given: Annotated[Path, typer.Argument(help="A NIfTI file, or a folder of cases.", metavar="IN")],
    target: Annotated[
        Path, typer.Argument(help="Folder for the label maps; or a .nii.gz for one case.", metavar="OUT")
    ],
    device: DeviceOption = "auto",
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
        from fasttrain.delivery import open_run, predict
        from fasttrain.engine.stop import Stopped

        try:
            trained = _opened(open_run(run, device, view.on_event), view)
            stop.begun = True
            told = _told(view, "predicting", stop)
            warn = lambda text: view.on_event(Message(text, "warning"))  # noqa: E731
            done = predict(trained, given, target, told, stop, overwrite, told, warn)
        except Stopped:
            return stop.exit_code
        finally:
            view.close()
    if json:
        parts = {"written": done.written, "passed_over": done.passed_over, "labels": done.labels}
        print_json(
            {**{name: [str(path) for path in paths] for name, paths in parts.items()}, "faults": list(done.faults)}
        )
    else:
        for path in done.written:
            print(path)
    for fault in done.faults:
        print(f"fasttrain: {fault}", file=sys.stderr)
    return EXIT_DATA if done.faults else EXIT_DONE


def _opened(trained: TrainedRun, view: Observer) -> TrainedRun:
    for sentence in trained.warnings:
        view.on_event(Message(sentence, "warning"))
    view.on_event(Message(trained.weights))
    return trained


def _told(view: Observer, what: str, stop: StopRequest) -> Any:
    def progress(done: int, total: int, within: str = "") -> None:
        view.on_event(Progress(what, done, total, within))
        stop.check()

    return progress


def _origin(trained: TrainedRun) -> dict[str, Any]:
    return {"run": str(trained.folder.path), "checkpoint": str(trained.checkpoint), "epoch": trained.epoch}


def _document(trained: TrainedRun, scores: Scores, names: tuple[str, ...]) -> dict[str, Any]:
    summary: Any = scores.summary
    every: Any = scores.cases
    cases = {
        score.name: {
            name: {
                "dice": one.dice,
                "hd95_mm": one.hd95,
                "hd95_penalised": one.hd95_penalised,
                **({"slice_dice": fmean(one.slice_dices)} if one.slice_dices else {}),
            }
            for name, one in zip(names, score.classes, strict=True)
        }
        for score in every
    }
    return {
        **_origin(trained),
        "dice": summary.dice,
        "dice_by_class": summary.dice_by_class,
        "dice_counts": summary.dice_counts,
        "background_dice": summary.background_dice,
        "hd95_mm": summary.hd95,
        "hd95_mm_by_class": summary.hd95_by_class,
        "hd95_penalised": summary.hd95_penalised,
        "slice_dice": summary.slice_dice,
        "slice_dice_by_class": summary.slice_dice_by_class,
        "slice_counts": summary.slice_counts,
        "cases": cases,
    }


def _print_scores(scores: Scores, names: tuple[str, ...]) -> None:
    summary: Any = scores.summary
    every: Any = scores.cases
    rows = [("case", *names)]
    rows += [(score.name, *(score_text(one.dice, 4) for one in score.classes)) for score in every]
    rows.append(("mean", *(score_text(summary.dice_by_class[name], 4) for name in names)))
    rows.append(("counted", *(str(summary.dice_counts[name]) for name in names)))
    if summary.slice_counts:
        rows.append(("mean of slices", *(score_text(summary.slice_dice_by_class[name], 4) for name in names)))
        rows.append(("counted slices", *(str(summary.slice_counts[name]) for name in names)))
    print_table(rows)
    volumes = f" over {counted(summary.cases, 'case')}"
    slices = f", of single slices {score_text(summary.slice_dice, 4)}" if summary.slice_counts else ""
    print(f"mean Dice {score_text(summary.dice, 4)}{volumes}{slices}")
    if summary.hd95 is not None:
        penalised = sum(summary.hd95_penalised.values())
        print(f"mean HD95 {summary.hd95:.2f} mm, {counted(penalised, 'structure')} missed or invented")
