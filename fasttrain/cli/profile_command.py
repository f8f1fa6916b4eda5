"""Owns `profile`: its options, where it writes, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.interruption import unwinding
from fasttrain.cli.printing import print_json
from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DONE
from fasttrain.machine.hardware import wants_gpu
from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
from fasttrain.recipe import resolve
from fasttrain.studies.study_folder import NewStudyFolder
from fasttrain.whole_files import write_json

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe
    from fasttrain.studies.profiling.profile import Profile

OutOption = Annotated[
    Path | None, typer.Option("--out", help="New folder for what is written; else ./runs/NAME-COMMAND-TIMESTAMP.")
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option("--price", help="What an hour of a card costs, for the cost of the run there.", metavar="CARD=USD"),
]


def profile_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    prices: PriceOption = None,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Take steps under NVIDIA Nsight Systems as well, where it is installed.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Say where a training step's time goes, what holds the run back, and what would gain most.

    Some steps of the run are taken with real data, over one batch again and again, and the loader is run alone. From these come
    the verdict (data-bound, launch-bound, bandwidth-bound, compute-bound or validation-bound) and the two changes that would gain
    most. trace.json opens in ui.perfetto.dev or chrome://tracing. Nothing is trained that is kept.
    """
    resolved = resolve(recipe, list(assignments or []))
    wants_gpu(device)
    from fasttrain.studies.profiling.cards import read_prices

    known = read_prices(list(prices or []))
    program = None
    if nsys:
        from fasttrain.studies.profiling.nsys import find_nsys

        program = find_nsys()
    limit_threads(thread_count(resolved.recipe.acceleration.threads, probably_on_gpu(device))[0])
    # Before there is a folder: a signal ends the command at once while torch is loaded
    from fasttrain.studies.profiling import profile  # noqa: F401

    with NewStudyFolder(out, f"{resolved.recipe.name}-profile", "profile") as folder:
        code = _profiled(resolved.recipe, data, device, folder.path, known, program, json)
        if code == EXIT_DONE:
            folder.finish()
    return code


def _profiled(
    recipe: Recipe,
    data: Path | None,
    device: str,
    folder: Path,
    prices: dict[str, float],
    program: str | None,
    json: bool,
) -> int:
    with stop_on_signals() as stop:
        try:
            found = _found(recipe, data, device, folder, stop, prices)
        except Stopped:
            # Without its verdict it says nothing
            (folder / "trace.json").unlink(missing_ok=True)
            return say_stopped(stop, "nothing was concluded")
    record = {"exit_code": EXIT_DONE, **found.record(), "nsys": None}
    write_json(folder / "profile.json", record)
    if program is not None:
        from fasttrain.studies.profiling.nsys import run_nsys

        with unwinding():
            record["nsys"] = str(run_nsys(program, recipe, data, device, folder))
        write_json(folder / "profile.json", record)
    if json:
        print_json(record)
    else:
        from fasttrain.cli.profile_table import print_profile

        print_profile(found)
        if record["nsys"]:
            print(f"Nsight Systems: {record['nsys']}")
    sys.stdout.flush()
    return EXIT_DONE


def _found(
    recipe: Recipe, data: Path | None, device: str, folder: Path, stop: StopRequest, prices: dict[str, float]
) -> Profile:
    view = open_view(sys.stderr)
    try:
        from fasttrain.studies.profiling.profile import profile

        stop.begun = True
        return profile(recipe, data, device, folder, view.on_event, stop, prices)
    finally:
        view.close()
