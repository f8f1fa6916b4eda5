"""Owns `doctor`: what the machine has for training, what is slow there and what is broken, as lines or a document."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.printing import print_json, tell
from fasttrain.cli.run_commands import DataOption, JsonOption
from fasttrain.errors import EXIT_DONE, EXIT_MACHINE, DataError
from fasttrain.recipe import resolve
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.machine.diagnosis import Finding
    from fasttrain.recipe import Recipe

_STATE_WIDTH, _NAME_WIDTH = 7, 16


def doctor_command(
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Hold the room for its checkpoints against the disk.", metavar="NAME|FILE"),
    ] = None,
    data: DataOption = None,
    run: Annotated[Path, typer.Option("--run", help="Folder that runs will be written to.")] = Path("runs"),
    json: JsonOption = False,
) -> int:
    """Look at the machine: torch, driver, GPU, cuDNN, compiler, CPUs, memory, disks, and what outlives the pod.

    One line a matter: ok, warning (training works, but slower, in part or at a risk) or fault, and below it what mends it. A
    small convolution really runs on each GPU, a small kernel is really compiled, and disks are really written and read. A
    machine without a GPU is a warning, one whose GPU cannot be used a fault. Exit code 4 where there is a fault, else 0.
    """
    from fasttrain.machine.diagnosis import Scene, examine

    if data is not None and not data.is_dir():
        raise DataError(f"--data {data}: there is no such folder")
    resolved = None if recipe is None else resolve(recipe).recipe
    need = None if resolved is None else _need_of(resolved)
    found = examine(Scene(runs=run, data=data or _usual_data(resolved), need=need))
    findings = list(found) if json else list(_shown(found))
    code = exit_code(findings)
    if json:
        shown = [{"name": one.name, "state": one.state, "told": one.told, "mend": one.mend} for one in findings]
        print_json({"exit_code": code, "findings": shown})
    else:
        tell(f"fasttrain: {_sum(findings)}")
    return code


def exit_code(findings: list[Finding]) -> int:
    """4 where something is broken."""
    return EXIT_MACHINE if any(one.state == "fault" for one in findings) else EXIT_DONE


def _shown(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Prints each as it comes: where a disk or a driver keeps doctor waiting, the line before says which."""
    for one in findings:
        print(f"{one.state:{_STATE_WIDTH}}  {one.name:{_NAME_WIDTH}}  {one.told}")
        if one.mend:
            print(f"{'':{_STATE_WIDTH + _NAME_WIDTH + 2}}  mend: {one.mend}")
        sys.stdout.flush()
        yield one


def _sum(findings: list[Finding]) -> str:
    states = [one.state for one in findings]
    faults, warnings = states.count("fault"), states.count("warning")
    if not faults and not warnings:
        return f"all {len(findings)} ok"
    return f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}, {states.count('ok')} ok"


def _need_of(recipe: Recipe) -> Callable[[], int]:
    """What a run's checkpoints will take, with the one that is being written; loads torch when it is called."""

    def need_bytes() -> int:
        from fasttrain.engine.checkpoint_space import checkpoints_kept, expected_checkpoint_bytes
        from fasttrain.engine.outline import outline_of

        return expected_checkpoint_bytes(recipe, outline_of(recipe).parameters) * (checkpoints_kept(recipe) + 1)

    return need_bytes


def _usual_data(recipe: Recipe | None) -> Path | None:
    """Where `train` would look: the recipe's own folder, else the one that all sets lie in."""
    from fasttrain.data.location import usual_folder

    given = os.environ.get("FASTTRAIN_DATA")
    places = [Path(given).expanduser() if given else Path("data")]
    if recipe is not None:
        places.insert(0, usual_folder(recipe.data_name, os.environ)[0])
    return next((place for place in places if place.is_dir()), None)
