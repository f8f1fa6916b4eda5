"""Owns `tune-batch` and `tune`: their options, and what is asked by them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrain.cli.launching import count_of, launch
from fasttrain.cli.limit_options import (
    MaxCostOption,
    MaxHoursOption,
    OnFinishOption,
    PriceOption,
    UntilDiceOption,
    read_limits,
)
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption, resolve_fold
from fasttrain.cli.signals import stop_on_signals
from fasttrain.cli.tune_study import TuneStudy
from fasttrain.errors import RecipeError
from fasttrain.machine.hardware import wants_gpu
from fasttrain.recipe import resolve

if TYPE_CHECKING:
    from fasttrain.recipe import ResolvedRecipe
    from fasttrain.studies.options import Options

_TUNE_BUDGET = "3m"

RunOption = Annotated[Path | None, typer.Option("--run", help="New run folder; else ./runs/NAME-TIMESTAMP.")]
PreferOption = Annotated[
    str,
    typer.Option(
        "--prefer",
        help="throughput: the smallest batch within 2% of the fastest; memory: the one that holds least within 10%; largest: "
        "the largest that fits.",
    ),
]
MarginOption = Annotated[float, typer.Option("--margin", help="Share of the GPU's memory that is to stay free.")]
TrialsOption = Annotated[
    list[str] | None, typer.Option("--trials", help="Most trials of batch sizes (12).", metavar="[KIND:]N")
]
SizesOption = Annotated[
    list[str] | None,
    typer.Option("--batch-sizes", help="Sizes to measure, and no others.", metavar="[KIND:]1,2,4"),
]
TuneGpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="Take each trial's steps (and those of the run) with so many GPUs of this machine together; with --device cpu with "
        "so many processes.",
        metavar="N|all",
    ),
]
TrialSecondsOption = Annotated[
    str, typer.Option("--trial-time", help="Time limit of one trial, such as 90s or 5m; a hung one is ended then.")
]


def tune_batch_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    run: RunOption = None,
    device: DeviceOption = "auto",
    gpus: TuneGpusOption = None,
    prefer: PreferOption = "throughput",
    margin: MarginOption = 0.08,
    sizes: SizesOption = None,
    trials: TrialsOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Time for the sweep, such as 90s or 3m; else 1m. Compiling comes on top."),
    ] = None,
    trial_time: TrialSecondsOption = "2m",
    json: JsonOption = False,
) -> int:
    """Measure batch sizes on this machine and write down the best; nothing is trained.

    Each size runs in a process of its own with the recipe's network, precision, data and augmentation, and one validation of
    the largest case is made at the chosen size. What is found lies in the run's tune/lock.json and in fasttrain's cache folder,
    where `train --tuned` looks for it.

    A range or number applies to all networks, or as KIND:VALUES (such as dynunet:1,2,4) to one network.kind; universal: is all.
    """
    resolved = resolve(recipe, list(assignments or []))
    wants_gpu(device)
    options = _options(
        resolved, prefer, margin, sizes, trials, budget, trial_time, 1 if gpus is None else count_of(gpus, device)
    )
    command = TuneStudy(resolved, data, run, device, options, json, wide=False)
    with stop_on_signals() as stop:
        return command.study(stop)


def tune_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    run: RunOption = None,
    device: DeviceOption = "auto",
    gpus: TuneGpusOption = None,
    budget: Annotated[str, typer.Option("--budget", help="Time for all trials, such as 90s or 3m.")] = _TUNE_BUDGET,
    no_train: Annotated[bool, typer.Option("--no-train", help="Stop before the run.")] = False,
    prefer: PreferOption = "throughput",
    margin: MarginOption = 0.08,
    sizes: SizesOption = None,
    trials: TrialsOption = None,
    window_batches: Annotated[
        list[str] | None,
        typer.Option("--window-batches", help="Windows at a time in validation.", metavar="[KIND:]1,4,8"),
    ] = None,
    stitching: Annotated[
        list[str] | None, typer.Option("--stitching", help="Where windows are summed.", metavar="[KIND:]gpu,cpu")
    ] = None,
    workers: Annotated[
        list[str] | None, typer.Option("--workers", help="Loader workers.", metavar="[KIND:]0,2,4")
    ] = None,
    prefetch: Annotated[
        list[str] | None, typer.Option("--prefetch", help="Batches each worker is ahead.", metavar="[KIND:]2,4")
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option(
            "--caches",
            help="Kinds of data.cache to compare: none, memory, disk, lmdb or gpu.",
            metavar="[KIND:]memory,gpu",
        ),
    ] = None,
    trial_time: TrialSecondsOption = "2m",
    fold: Annotated[
        str | None, typer.Option("--fold", help="Fold of a k-fold split that validates.", metavar="K")
    ] = None,
    max_hours: MaxHoursOption = None,
    max_cost: MaxCostOption = None,
    price_per_hour: PriceOption = None,
    until_dice: UntilDiceOption = None,
    on_finish: OnFinishOption = None,
    json: JsonOption = False,
) -> int:
    """Measure batch size, cache, loader and sliding window on this machine, then train with what is fastest.

    Limits end the training; the time and cost of the measuring count, but do not end it. --on-finish follows all of it.

    A range or number applies to all networks, or as KIND:VALUES (such as dynunet:1,2,4) to one network.kind; universal: is all.
    """
    from fasttrain.studies.options import read_numbers, read_words

    ON_FINISH.ask(on_finish)
    limits = read_limits(max_hours, max_cost, price_per_hour, until_dice)
    if no_train and limits.options:
        raise RecipeError(f"--no-train trains nothing that{limits.options} could end; give that to `train --tuned`")
    if fold == "all":
        raise RecipeError("--fold all: `tune --no-train` measures, then `train --tuned --fold all` trains every fold")
    sets = list(assignments or [])
    resolved = resolve(recipe, sets) if fold is None else resolve_fold(recipe, sets, fold)
    limits.check_score(resolved.recipe.task_facts)
    wants_gpu(device)
    ranks = 1 if gpus is None else count_of(gpus, device)
    kind = resolved.recipe.network.kind
    options = replace(
        _options(resolved, prefer, margin, sizes, trials, budget, trial_time, ranks),
        window_batches=read_numbers("--window-batches", window_batches, kind),
        stitching=read_words("--stitching", stitching, kind, ("gpu", "cpu")),
        workers=read_numbers("--workers", workers, kind, least=0),
        prefetch=read_numbers("--prefetch", prefetch, kind),
        caches=read_words("--caches", caches, kind, ("none", "memory", "disk", "lmdb", "gpu")),
    )
    command = TuneStudy(resolved, data, run, device, options, json, wide=True)
    with stop_on_signals() as stop:
        code = command.study(stop, told=no_train)
        if code or no_train:
            return code
        if ranks == 1:
            return command.train(stop, limits)
    # What was found is in the machine's cache folder; a value that was tuned must not be set, too
    kept = [text for text in sets if text.partition("=")[0].strip() not in command.found_settings]
    words = ["train", "--recipe", recipe, "--tuned", "--run", str(command.folder.path), "--device", device]
    words += [f"--set={text}" for text in kept] + shlex.split(limits.options)
    words += ["--data", str(data)] if data is not None else []
    words += ["--fold", fold] if fold is not None else []
    return launch(ranks, [*words, "--json"] if json else words)


def _options(
    resolved: ResolvedRecipe,
    prefer: str,
    margin: float,
    sizes: list[str] | None,
    trials: list[str] | None,
    budget: str | None,
    trial_time: str,
    ranks: int,
) -> Options:
    from fasttrain.studies.options import Options, read_numbers, read_seconds

    kind = resolved.recipe.network.kind
    most = read_numbers("--trials", trials, kind)
    seconds = read_seconds("--trial-time", trial_time)
    assert seconds is not None
    return Options(
        prefer=prefer,
        margin=margin,
        trials=max(most) if most else Options.trials,
        sizes=read_numbers("--batch-sizes", sizes, kind),
        budget_seconds=read_seconds("--budget", budget),
        trial_seconds=seconds,
        ranks=ranks,
    )
