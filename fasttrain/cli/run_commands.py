"""Owns `train`: from options to a run, with a view of it on stderr and its result on stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.launching import GpusOption, launched
from fasttrain.cli.limit_options import (
    MaxCostOption,
    MaxHoursOption,
    OnFinishOption,
    PriceOption,
    UntilDiceOption,
    read_limits,
)
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.printing import print_json, print_plan, tell
from fasttrain.cli.several import SEVERAL
from fasttrain.cli.signals import stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.limits import Limits
from fasttrain.engine.resuming.auto import run_of_command
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import RecipeError
from fasttrain.kernels.compiling import start_early
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.collector import collector_at_rest
from fasttrain.machine.compiler import keep_compiled
from fasttrain.machine.hardware import wants_gpu
from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import Observer
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.engine.preparing import Prepared
    from fasttrain.engine.run import RunResult
    from fasttrain.history.estimate import Estimate
    from fasttrain.recipe import Recipe, ResolvedRecipe

RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", help="A bundled recipe's name or a YAML file.", metavar="NAME|FILE")
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data set; else $FASTTRAIN_DATA/NAME or ./data/NAME.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Set any recipe value.", metavar="KEY.PATH=VALUE")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def train_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    run: Annotated[Path | None, typer.Option("--run", help="New run folder; else ./runs/NAME-TIMESTAMP.")] = None,
    fold: Annotated[
        str | None,
        typer.Option("--fold", help="Fold of a k-fold split that validates; all: every fold in turn.", metavar="K|all"),
    ] = None,
    device: DeviceOption = "auto",
    gpus: GpusOption = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Use what `tune-batch` or `tune` found for this recipe on this machine.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            help="Begin the run, or go on with it where it is begun: in --run, else in this recipe's newest folder under ./runs.",
            metavar="auto",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and train nothing; cases are checked, which is remembered, and a made phantom is written.",
        ),
    ] = False,
    max_hours: MaxHoursOption = None,
    max_cost: MaxCostOption = None,
    price_per_hour: PriceOption = None,
    until_dice: UntilDiceOption = None,
    on_finish: OnFinishOption = None,
    json: JsonOption = False,
) -> int:
    """Train a recipe in a new run folder."""
    if not SEVERAL.meet(device):
        return SEVERAL.follow(data, device)
    ON_FINISH.belongs_to(None if dry_run else run)
    ON_FINISH.ask(None if dry_run else on_finish)
    # A command that is given over and over would have its hours anew each time
    limits = read_limits(
        max_hours, max_cost, price_per_hour, until_dice, of_run=resume is not None or SEVERAL.restarts > 0
    )
    sets = list(assignments or [])
    all_folds = fold == "all"
    resolved = resolve(recipe, sets) if fold is None or all_folds else resolve_fold(recipe, sets, fold)
    if all_folds:
        from fasttrain.recipe.data_spec import check_folds

        check_folds(resolved.recipe.data.split)
    # Looked at before torch is loaded, which takes seconds
    wants_gpu(device)
    again = resume is None and SEVERAL.restarts > 0
    if (resume is not None or again) and not dry_run:
        if resume not in ("auto", None):
            raise RecipeError(
                f"--resume {resume}: should be auto; `fasttrain resume RUN` goes on with a run of your choice"
            )
        run, begun = run_of_command(resolved.recipe.name, run, since=SEVERAL.began_at if again else None)
        if run is not None and begun:
            from fasttrain.cli.resume_command import go_on

            if (code := launched(gpus, device)) is not None:
                return code
            going = None if device == "auto" else device
            return go_on(RunFolder(run), data, going, limits, json, asked=resolved.recipe)
    if run is not None and not dry_run:
        RunFolder(run).check_new()
    if (code := launched(gpus, device)) is not None:
        return code
    _limit_threads(resolved.recipe, device)
    asked = resolved.recipe
    with stop_on_signals() as stop:
        try:
            if tuned:
                resolved = _tuned(resolved, device)
            return _train(
                resolved, data, run, device, stop, limits, asked, all_folds=all_folds, dry_run=dry_run, json=json
            )
        except Stopped:
            return _stopped(stop, json)


def resolve_fold(recipe: str, sets: list[str], fold: str) -> ResolvedRecipe:
    """The recipe with the fold that validates. Raises RecipeError where that is no number, or the recipe has no folds."""
    if not fold.isdecimal():
        raise RecipeError(f"--fold {fold}: should be a number from 0, or all")
    kind = resolve(recipe, sets).recipe.data.split.kind
    if kind != "kfold":
        raise RecipeError(f"--fold {fold}: the recipe's data.split.kind is {kind}; folds need kfold")
    return resolve(recipe, [*sets, f"data.split.fold={fold}"])


def _train(
    resolved: ResolvedRecipe,
    data: Path | None,
    run: Path | None,
    device: str,
    stop: StopRequest,
    limits: Limits,
    asked: Recipe,
    *,
    all_folds: bool,
    dry_run: bool,
    json: bool,
) -> int:
    engine = _load_engine(device)
    if dry_run:
        view = open_view(sys.stderr)
        try:
            seat = SEVERAL.ranks.place
            shared = engine.with_ranks(resolved, seat.ranks)
            prepared = engine.prepare(shared.recipe, data, device, view.on_event, stop=stop, seat=seat)
        finally:
            view.close()
        print_plan(prepared, json, expected(prepared, run, limits, all_folds=all_folds))
        return 0
    if all_folds:
        from fasttrain.engine.folds import train_folds

        result = train_folds(
            resolved,
            data=data,
            run=run,
            device=device,
            watch=_watch,
            stop=stop,
            began=process_start(),
            limits=limits,
            ranks=SEVERAL.ranks,
        )
        return _told_all(result, json)
    result = engine.train(
        resolved,
        data=data,
        run=run,
        device=device,
        observers=_observers(),
        stop=stop,
        began=process_start(),
        limits=limits,
        asked=asked,
        ranks=SEVERAL.ranks,
    )
    return _told(result, json)


def expected(prepared: Prepared, run: Path | None, limits: Limits, *, all_folds: bool) -> Estimate | str:
    """What the run will take by a past one, under ./runs or beside the folder it is to have; else why that is not known."""
    from fasttrain.engine.resuming.changes import as_values
    from fasttrain.history.estimate import Wanted, estimate
    from fasttrain.recipe.data_spec import KFoldSplit

    split, hardware = prepared.recipe.data.split, prepared.hardware
    count = split.folds if all_folds and isinstance(split, KFoldSplit) else 1
    wanted = Wanted(
        as_values(prepared.recipe), prepared.plan.record(), hardware.device_name, hardware.on_gpu, hardware.cpus, count
    )
    bases = [Path("runs"), *([run.parent] if run is not None else [])]
    return estimate(wanted, bases, limits.price_per_hour)


def _tuned(resolved: ResolvedRecipe, device: str) -> ResolvedRecipe:
    """Raises RecipeError with the reason where nothing that was tuned holds here."""
    _load_engine(device)
    from fasttrain.machine.hardware import survey
    from fasttrain.studies.lock import tuned
    from fasttrain.studies.machine_record import machine_record

    found, told = tuned(resolved, machine_record(survey(device)), own_cache_folder(), SEVERAL.ranks.place.ranks)
    tell(told)
    return found


def _load_engine(device: str) -> ModuleType:
    """Loads torch and all that trains; where there will be a GPU, the process that compiles kernels begins beside it."""
    if probably_on_gpu(device):
        keep_compiled(own_cache_folder())
        start_early()
    with collector_at_rest():
        from fasttrain.engine import run as engine
    return engine


def _stopped(stop: StopRequest, json: bool) -> int:
    again = f"go on with: {stop.goes_on_with}{ON_FINISH.option}" if stop.goes_on_with else "give the command again"
    tell(
        f"fasttrain: stopped by {stop.reason} before training began; what was read of the cases is remembered; {again}"
    )
    if json:
        print_json({"status": "stopped", "stopped_by": stop.reason, "exit_code": stop.exit_code})
    return stop.exit_code


def process_start() -> float:
    """When this process began, in Unix seconds: imports count."""
    try:
        import psutil

        return float(psutil.Process().create_time())
    except Exception:  # a /proc that is not there is no reason not to train
        return time.time()


def _limit_threads(recipe: Recipe, device: str) -> None:
    """Before torch is loaded: its pools read their size then."""
    sharing = SEVERAL.ranks.place.local_ranks if SEVERAL.met else 1
    limit_threads(thread_count(recipe.acceleration.threads, probably_on_gpu(device), sharing)[0])


def _told(result: RunResult, json: bool) -> int:
    if json:
        print_json({"run": str(result.run), **result.summary})
    return result.exit_code


def _watch(fold: int, folds: int) -> list[Observer]:
    tell(f"fold {fold}, {fold + 1} of {folds}")
    return _observers()


def _observers() -> list[Observer]:
    return [open_view(sys.stderr), ON_FINISH]


def _told_all(result: RunResult, json: bool) -> int:
    summary = result.summary
    scored, value = len(summary.get("cases", {})), summary["best"]["value"]
    name, unit = ("mean Dice", "") if summary["best"]["metric"] == "val_dice" else ("dose score", " Gy")
    score = (
        f"{name} {value:.4f}{unit} over {counted(scored, 'case')}, each by the network that never saw it"
        if value is not None
        else "no score"
    )
    _report_all(result.run)
    tell(f"all folds, {summary['status']}: {score}; run folder {result.run}")
    return _told(result, json)


def _report_all(run: Path) -> None:
    """The page of all folds; that of each fold is written as the fold ends."""
    from fasttrain.history.report import told_of, write_report

    began = time.perf_counter()
    try:
        if resolve(str(RunFolder(run).recipe)).recipe.output.report:
            told = told_of(write_report(RunFolder(run)), time.perf_counter() - began)
            tell(told)
    except Exception as error:
        # The run has ended as it has
        tell(f"fasttrain: no report was written: {str(error) or type(error).__name__}")
