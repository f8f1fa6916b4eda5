"""Owns `check`: every case of a data set read and judged before anything is trained, as a table or a document."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.printing import print_json
from fasttrain.cli.run_commands import JsonOption, SetOption
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DATA, EXIT_DONE, RecipeError
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.limits import cpu_limit
from fasttrain.recipe import resolve
from fasttrain.telemetry.events import Message, Observer, Progress

if TYPE_CHECKING:
    from fasttrain.data.checking import Checked, Terms
    from fasttrain.data.sources import FoundCases
    from fasttrain.data.splits import Split
    from fasttrain.recipe import Recipe


def check_command(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", "-r", help="Judge by this recipe: a bundled one's name or a YAML file.", metavar="NAME|FILE"
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the data set; without a recipe its layout is recognised."),
    ] = None,
    assignments: SetOption = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Read every file again, also those that have not changed since the last check."),
    ] = False,
    json: JsonOption = False,
) -> int:
    """Read every image and label in full and list every fault of every case; nothing is trained.

    A table of all cases goes to stdout, then the faults with what mends each, then figures to choose settings by. Files that
    have not changed since an earlier check (path, size and time of change) are not read again. Exit code 3 where there are
    faults, also those that data.bad_cases: skip would leave out; warnings alone are 0. `train` makes the same check before it
    begins.
    """
    if recipe is None and data is None:
        raise RecipeError("check needs a recipe (--recipe NAME|FILE) or the folder of a data set (--data DIR)")
    if recipe is None and assignments:
        raise RecipeError(f"--set {assignments[0]}: sets a value of a recipe; name one with --recipe")
    resolved = resolve(recipe, assignments or []).recipe if recipe is not None else None
    view = open_view(sys.stderr)
    with stop_on_signals() as stop:
        stop.begun = True
        try:
            checked, split = _checked(resolved, data, full, view, stop)
        except Stopped:
            return say_stopped(stop, "what was read of the cases is remembered; give the command again")
        finally:
            view.close()
    if json:
        from fasttrain.data.checking.report import document_of

        print_json({"recipe": None if resolved is None else resolved.name, **document_of(checked, split)})
    else:
        from fasttrain.cli.check_table import print_check

        print_check(checked, split)
    return EXIT_DATA if checked.faults else EXIT_DONE


def _checked(
    recipe: Recipe | None, data: Path | None, full: bool, view: Observer, stop: StopRequest
) -> tuple[Checked, Split | None]:
    from fasttrain.data.checking import check_cases

    root, found, terms, split = _found(recipe, data)
    for warning in found.warnings:
        view.on_event(Message(warning, "warning"))

    def progress(done: int, total: int) -> None:
        view.on_event(Progress("checking files", done, total))
        stop.check()

    folder = own_cache_folder()
    return check_cases(found.every, root, terms, split, folder, cpu_limit(), progress, full, found.faults), split


def _found(recipe: Recipe | None, data: Path | None) -> tuple[Path, FoundCases, Terms, Split | None]:
    from fasttrain.data.checking import Terms

    if recipe is None:
        from fasttrain.data.layouts import look_at_layout
        from fasttrain.data.sources import FoundCases

        assert data is not None
        layout = look_at_layout(data)
        spec = layout.reading_spec("refuse")
        # By the names that the set gives its values; any other value counts as a class as well
        classes = {value: name for value, name in spec.classes.items() if value != layout.ignore_label}
        update = {"classes": {**classes, **layout.names}, "ignore_label": layout.ignore_label}
        terms = Terms(spec.model_copy(update=update), layout.dimensions, named=tuple(layout.names))
        return data, FoundCases(layout.cases, layout.warnings, layout.incomplete, layout.faults), terms, None
    from fasttrain.data.finding import cases_for
    from fasttrain.data.location import data_root
    from fasttrain.data.splits import split_cases

    root = data_root(recipe, data, os.environ)
    found = cases_for(recipe.data, root)
    return root, found, Terms.of_recipe(recipe), split_cases(found.every, recipe.data.split)
