"""Owns `ablate`: its options, what it writes while it goes on, and how it ends."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.printing import print_json, print_table
from fasttrain.cli.profile_command import OutOption
from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped
from fasttrain.errors import EXIT_DONE, RecipeError, StorageError, exit_code_of
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.hardware import wants_gpu
from fasttrain.recipe import resolve
from fasttrain.studies.study_folder import NewStudyFolder
from fasttrain.whole_files import write_json

if TYPE_CHECKING:
    from fasttrain.studies.ablation.ablate import Ablation


def ablate_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="Time for all trials after the cases were checked, such as 90s or 10m; else about 3m."
        ),
    ] = None,
    trial_time: Annotated[
        str, typer.Option("--trial-time", help="Time limit of one trial, such as 90s; a hung one is ended then.")
    ] = "1m",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Switches to try, and no others.", metavar="amp,compile,…")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure what each acceleration gives on this machine: off alone, and on alone from a plain loop of PyTorch's.

    Each trial runs some training steps in a process of its own, without validation and without whole epochs. First each setting
    is measured once; then trials take turns while the time lasts, and so do the two that others are held against. The table is
    written as CSV, Markdown, a picture and JSON after each; Ctrl-C keeps it.
    """
    from fasttrain.studies.ablation.ablate import BUDGET_SECONDS, Ablation
    from fasttrain.studies.ablation.switches import read_only
    from fasttrain.studies.options import read_seconds
    from fasttrain.studies.trials import TrialServer

    resolved = resolve(recipe, list(assignments or []))
    wants_gpu(device)
    chosen, limit, seconds = read_only(only), read_seconds("--trial-time", trial_time), read_seconds("--budget", budget)
    if not limit or limit <= 0 or seconds == 0:
        raise RecipeError("--trial-time and --budget: should be above 0")
    with NewStudyFolder(out, f"{resolved.recipe.name}-ablate", "ablate") as place, stop_on_signals() as stop:
        folder = place.path
        view = open_view(sys.stderr)
        stop.begun = True
        study = None
        try:
            server = TrialServer(folder / "trials", view.on_event, stop)
            try:
                study = Ablation(
                    resolved, data, device, server, seconds or BUDGET_SECONDS, limit, view.on_event, chosen
                )
                _run(study, folder)
            finally:
                server.close()
        except Stopped:
            view.close()
            _end(study, folder, "stopped", stop.exit_code, json)
            if study is None or not study.rows:
                shutil.rmtree(folder / "trials", ignore_errors=True)
                return say_stopped(stop, "nothing was measured")
            return say_stopped(stop, "the table holds what was measured until then; the same command begins it anew")
        except BaseException as error:
            view.close()
            # A disk that is full already must not take the place of the first error
            with contextlib.suppress(StorageError):
                _end(study, folder, "failed", exit_code_of(error), True, told=False)
            raise
        view.close()
        _end(study, folder, "done", EXIT_DONE, json)
        sys.stdout.flush()
        place.finish()
    return EXIT_DONE


def _run(study: Ablation, folder: Path) -> None:
    from fasttrain.studies.turns import told_of_others

    study.found = lambda: _write(study, folder, "running", EXIT_DONE)
    study.look()
    with told_of_others(own_cache_folder(), study.machine, study.emit):
        study.run()


def _write(study: Ablation, folder: Path, status: str, exit_code: int) -> None:
    from fasttrain.studies.ablation.table import document, write_tables

    write_tables(study, folder)
    write_json(folder / "ablate.json", {"status": status, "exit_code": exit_code, **document(study)})


def _end(study: Ablation | None, folder: Path, status: str, exit_code: int, json: bool, told: bool = True) -> None:
    """Writes what there is for the last time, and prints it."""
    from fasttrain.studies.ablation.table import caption, document, draw, left_out, not_tried, shown_rows, title_of

    if study is None or not study.rows:
        if told and json:
            print_json({"status": status, "exit_code": exit_code, "rows": []})
        return
    _write(study, folder, status, exit_code)
    draw(study, folder)
    if not told:
        return
    if json:
        print_json({"status": status, "exit_code": exit_code, **document(study), "folder": str(folder)})
        return
    print(title_of(study))
    print_table(shown_rows(study))
    print(caption(study))
    for sentence in not_tried(study):
        print(sentence)
    if study.ended:
        print(f"ended: {study.ended}")
    for sentence in left_out(study):
        print(sentence)
    print(f"written to {folder}: ablate.csv, ablate.md, ablate.png, ablate.json")
