"""Owns `resume`: which run is gone on with, and how, for it and for `train --resume auto`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fasttrain.cli.launching import GpusOption, launched
from fasttrain.cli.limit_options import (
    MaxCostOption,
    MaxHoursOption,
    OnFinishOption,
    PriceOption,
    UntilDiceOption,
    read_limits,
    tell_dropped,
)
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.printing import print_json, tell
from fasttrain.cli.run_commands import (
    JsonOption,
    _limit_threads,
    _load_engine,
    _observers,
    _stopped,
    _told,
    _told_all,
    _watch,
    process_start,
)
from fasttrain.cli.several import SEVERAL
from fasttrain.cli.signals import stop_on_signals
from fasttrain.engine.limits import Limits, ended_by_limit, is_over
from fasttrain.engine.resuming.auto import asked_otherwise
from fasttrain.engine.stop import Stopped
from fasttrain.errors import EXIT_USAGE, RecipeError, StorageError
from fasttrain.machine.hardware import wants_gpu
from fasttrain.recipe import Recipe, resolve
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import newest_unfinished
from fasttrain.whole_files import read_record


def resume_command(
    run: Annotated[Path | None, typer.Argument(help="Run folder; else the newest unfinished one under ./runs.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the data set; else where the run began with it.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Another device than the run began on.")] = None,
    gpus: GpusOption = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            help="Change a recipe value from here on, such as training.epochs=20; what cannot change is refused with the reason.",
            metavar="KEY.PATH=VALUE",
        ),
    ] = None,
    max_hours: MaxHoursOption = None,
    max_cost: MaxCostOption = None,
    price_per_hour: PriceOption = None,
    until_dice: UntilDiceOption = None,
    on_finish: OnFinishOption = None,
    json: JsonOption = False,
) -> int:
    """Go on with a run where it ended.

    From its newest sound checkpoint, exactly; what could not be restored is said. The folder may have been moved, the data too
    (--data), and the device may be another. With another batch size the samples seen carry on.
    """
    if device is None and _is_of_cpu(run or newest_unfinished()[0]):
        # Ranks are counted, and meet, before anything else of the run is read
        device = "cpu"
    if not SEVERAL.meet(device or "auto"):
        return SEVERAL.follow(data, device or "auto")
    ON_FINISH.belongs_to(run)
    ON_FINISH.ask(on_finish)
    limits = read_limits(max_hours, max_cost, price_per_hour, until_dice)
    if run is None:
        unfinished, newest = newest_unfinished()
        if newest is None:
            raise RecipeError("there is no run under ./runs; name a run folder")
        if unfinished is None and assignments:
            raise RecipeError(f"no run under ./runs is unfinished; to change a finished one, name it, such as {newest}")
        if unfinished is None:
            failed = RunFolder(newest).never_trained()
            state = "which failed before its first step: give its command again" if failed else "and done"
            tell(f"nothing to do: no run under ./runs is unfinished; the newest is {newest}, {state}")
            if failed:
                return EXIT_USAGE
            if json:
                print_json({"status": "done", "run": str(newest)})
            return 0
        run = unfinished
    if (code := launched(gpus, device or "auto")) is not None:
        return code
    return go_on(RunFolder(run), data, device, limits, json, assignments or [])


def _is_of_cpu(run: Path | None) -> bool:
    """Whether the run was begun with --device cpu, which a resume keeps to."""
    if run is None:
        return False
    with contextlib.suppress(StorageError):
        # What is wrong with it is said by who opens the run
        for folder in (RunFolder(run), RunFolder(RunFolder(run).fold(0))):
            if folder.environment.exists():
                record = read_record(folder.environment, {"arguments.device": str})
                return bool(record["arguments"]["device"] == "cpu")
    return False


def go_on(
    folder: RunFolder,
    data: Path | None,
    device: str | None,
    limits: Limits,
    json: bool,
    assignments: Sequence[str] | Mapping[str, Any] = (),
    asked: Recipe | None = None,
) -> int:
    """Goes on with a run, asked for by `resume`, or by a `train --resume auto` whose recipe is `asked`."""
    run = folder.path
    ON_FINISH.belongs_to(run)
    wants_gpu(device or "auto")
    if not folder.holds_a_run():
        raise RecipeError(f"{run} holds no run (it has no recipe.yaml); `fasttrain train` begins one")
    if asked is not None:
        assignments = asked_otherwise(folder, asked)
    of_all_folds = folder.folds.exists()
    if of_all_folds and assignments and asked is None:
        raise RecipeError(
            f"{run} holds all folds of a split, and --set is for one: name a fold, such as {folder.fold(0)}"
        )
    _limit_threads(resolve(str(folder.recipe), assignments).recipe, device or "auto")
    over = is_over(folder, limits, asked_for=asked is None) and not assignments
    if over:
        # Its last epoch may be extended by another process just now
        folder.check_not_in_use()
        _tell_over(folder)
    elif (dropped := tell_dropped(folder, limits)) is not None:
        tell(f"fasttrain: {dropped}")
    with stop_on_signals() as stop:
        engine = _load_engine("cpu" if over else device or "auto")
        if of_all_folds:
            from fasttrain.engine.folds import resume_folds

            result = resume_folds(
                run,
                data=data,
                device=device,
                watch=_watch,
                stop=stop,
                began=process_start(),
                limits=limits,
                asked_for=asked is None,
                ranks=SEVERAL.ranks,
            )
            return _told_all(result, json)
        try:
            result = engine.resume(
                run,
                data=data,
                device=device,
                observers=_observers(),
                stop=stop,
                began=process_start(),
                limits=limits,
                asked_for=asked is None,
                assignments=assignments,
                asked=asked,
                ranks=SEVERAL.ranks,
            )
        except Stopped:
            return _stopped(stop, json)
    return _told(result, json)


def _tell_over(folder: RunFolder) -> None:
    limit = ended_by_limit(folder.read_summary())
    wider = "to go on, resume it with a wider one, or with --max-hours 10000 for none"
    ended = f"was ended by {limit}; {wider}" if limit else "is finished"
    tell(f"nothing to do: {folder.path} {ended}")
