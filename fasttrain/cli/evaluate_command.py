"""Owns `evaluate`: a trained run scored on whole volumes."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fasttrain.cli.printing import print_json
from fasttrain.cli.run_commands import DeviceOption, JsonOption
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.trained_commands import MirrorOption, RunArgument, opened, origin, telling
from fasttrain.cli.views import open_view
from fasttrain.errors import EXIT_DONE, RecipeError
from fasttrain.telemetry.events import Message


class Part(str, Enum):
    """Which cases are scored."""

    validation = "validation"
    test = "test"
    training = "training"
    all = "all"


def evaluate_command(
    run: RunArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Folder of the data set, or with --part all of another; else where the run found it."
        ),
    ] = None,
    part: Annotated[
        Part, typer.Option("--part", help="Which cases of the run's split; all: every labelled case of the folder.")
    ] = Part.validation,
    mirror: MirrorOption = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Surface Dice: how far surfaces may lie apart, in mm.")
    ] = 1.0,
    surfaces: Annotated[
        bool, typer.Option("--surfaces/--no-surfaces", help="HD95 and surface Dice too, which take longest.")
    ] = True,
    worst: Annotated[int, typer.Option("--worst", help="So many of the worst cases are listed and drawn.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the files; else RUN/evaluation/PART.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> int:
    """Score a trained run on whole volumes, case by case.

    Dice, HD95, surface Dice and volume error by case and class, in the grid and spacing of the files, with 95% bootstrap
    intervals of the means. They are written as cases.csv and evaluation.json, with pictures of the worst cases.
    A folder of all folds is scored as an ensemble, on the test part or on another set.
    """
    if not 0 < tolerance < float("inf"):
        raise RecipeError(f"--tolerance should be more than 0 mm, found {tolerance:g}")
    if worst < 0:
        raise RecipeError(f"--worst should be 0 or more, found {worst}")
    view = open_view(sys.stderr)
    with stop_on_signals() as stop:
        from fasttrain.cli.dose_table import doses_document, print_doses
        from fasttrain.cli.evaluation_text import evaluation_document, print_evaluation
        from fasttrain.delivery import evaluate, evaluate_in_full
        from fasttrain.delivery.evaluation import write_document
        from fasttrain.engine.stop import Stopped
        from fasttrain.scoring import DoseScore, DoseSummary

        try:
            trained = opened(run, device, mirror, view)
            stop.begun = True
            told = telling(view, "scoring", stop)
            warn = lambda text: view.on_event(Message(text, "warning"))  # noqa: E731
            if trained.recipe.task == "dose":
                scores = evaluate(trained, part.value, data, told, stop, told, warn)
            else:
                folder = out if out is not None else trained.folder.evaluation / part.value
                found = evaluate_in_full(
                    trained, part.value, data, folder, told, stop, tolerance, surfaces, worst, told, warn
                )
        except Stopped:
            return say_stopped(stop, "no scores were written")
        finally:
            view.close()
    if trained.recipe.task == "dose":
        doses = [score for score in scores.cases if isinstance(score, DoseScore)]
        assert isinstance(scores.summary, DoseSummary)
        if json:
            print_json({**origin(trained), **doses_document(scores.summary, doses)})
        else:
            print_doses(scores.summary, doses, trained.recipe.data.scored_names)
        return EXIT_DONE
    settings = {"part": part.value, "mirror": list(trained.recipe.validation.mirror)}
    document = {**origin(trained), **settings, **evaluation_document(found)}
    write_document(document, folder / "evaluation.json")
    if json:
        print_json(document)
    else:
        print_evaluation(found)
        print(f"files: {folder}")
    return EXIT_DONE
