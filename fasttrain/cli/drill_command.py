"""Owns `drill`: a recipe killed and resumed on the user's own machine, and what that costs, as a table or a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.figures import duration_text
from fasttrain.cli.printing import print_json, print_table, tell
from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption
from fasttrain.cli.signals import stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped
from fasttrain.errors import EXIT_DONE, EXIT_STORAGE, RecipeError
from fasttrain.machine.hardware import wants_gpu
from fasttrain.recipe import resolve
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.studies.drill.report import Kill, Report

_MOST_KILLS = 100


def drill_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    device: DeviceOption = "auto",
    kills: Annotated[int, typer.Option("--kills", help="How often the run is killed.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the moments at which it is killed.")] = 0,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="Time for all of it, such as 90s or 10m; else 3m, and up to 6m on a slow machine."
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option("--runs", help="Folder of your runs; the drill works beside them, on the same disk.")
    ] = Path("runs"),
    json: JsonOption = False,
) -> int:
    """Prove on this machine that the recipe survives being killed.

    A short part of the recipe (a few of its cases; its own network, precision, data path and optimizer) is trained without a
    kill, and again with SIGKILL at random moments: while training, saving, validating and starting. Resumed each time, it must
    have the losses and scores of the unbroken run: bit for bit on a CPU, within the spread of two unbroken runs on a GPU.

    Exit code 6, and the first step that differs, where it has not. The folder it works in is removed at the end.
    """
    resolved = resolve(recipe, list(assignments or []))
    wants_gpu(device)
    if not 1 <= kills <= _MOST_KILLS:
        raise RecipeError(f"--kills {kills}: should be from 1 to {_MOST_KILLS}")
    with stop_on_signals() as stop:
        from fasttrain.studies.drill.drill import Drill, Wishes
        from fasttrain.studies.options import read_seconds

        wishes = Wishes(kills, seed, read_seconds("--budget", budget), runs)
        view = open_view(sys.stderr)
        try:
            # From here on a signal must leave no process and no folder behind
            stop.begun = True
            report = Drill(resolved.recipe, data, device, wishes, view.on_event, stop).run()
        except Stopped:
            tell(f"fasttrain: the drill was stopped by {stop.reason}; nothing of it is left")
            return stop.exit_code
        finally:
            view.close()
    code = EXIT_DONE if report.difference is None else EXIT_STORAGE
    if json:
        print_json({"exit_code": code, **report.record()})
    else:
        _print(report)
    return code


def _print(report: Report) -> None:
    print(
        f"drill of {report.recipe} on {report.device}: {counted(report.steps, 'step')}, {counted(len(report.kills), 'kill')}"
    )
    heading = ("kill", "while", "after step", "went on from", "taken again", "training lost", "running again after")
    print_table([heading, *(_row(number, kill) for number, kill in enumerate(report.kills, 1))], indent="  ")
    if len(report.kills) < report.wanted_kills:
        print(f"  {report.wanted_kills - len(report.kills)} of {counted(report.wanted_kills, 'kill')} found no time")
    print(_verdict(report))
    if report.worst is not None:
        print(
            f"worst loss of work: {report.worst.lost_seconds:.1f} s of training, {counted(report.worst.lost_steps, 'step')}"
        )
    saves, pauses = report.record()["save_seconds"], report.record()["pause_seconds"]
    if saves is not None:
        print(
            f"a checkpoint of {report.checkpoint_mib:.1f} MiB takes {saves['median']:.2g} s to save, {saves['most']:.2g} s at "
            f"most; training stands still for {pauses['median'] * 1000:.0f} ms of it"
        )
    if report.expected_loss_seconds is not None:
        costs = duration_text(report.expected_loss_seconds)
        print(
            f"with output.checkpoint_every: {report.checkpoint_every}, a kill costs up to {costs} of training at this pace "
            f"({report.step_seconds:.2g} s a step), and {report.start_seconds:.0f} s to run again"
        )


def _row(number: int, kill: Kill) -> tuple[str, ...]:
    again = "–" if kill.restart_seconds is None else f"{kill.restart_seconds:.1f} s"
    steps = (str(kill.step), str(kill.resumed_step), counted(kill.lost_steps, "step"))
    return (str(number), kill.moment, *steps, f"{kill.lost_seconds:.1f} s", again)


def _verdict(report: Report) -> str:
    times = counted(len(report.kills), "kill")
    if report.difference is not None:
        kept = f"; the records of both runs lie in {report.kept}" if report.kept else ""
        return f"DIFFERENT: step {report.difference.step}: {report.difference.text}{kept}"
    if report.spread is None:
        return f"same: after {times} every loss and every score is that of the unbroken run, bit for bit"
    return (
        f"same: after {times} losses lie within {report.spread.broken:.2%} of those of an unbroken run; two unbroken runs lie up "
        f"to {report.spread.unbroken:.2%} apart"
    )
