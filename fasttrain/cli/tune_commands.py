"""Owns `tune-batch` and `tune`: a study of the recipe on this machine, its table and lock, and the run with what it found."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrain.cli.printing import print_json
from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption
from fasttrain.cli.signals import stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DONE
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.hardware import wants_gpu
from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder, new_run_path, write_json
from fasttrain.telemetry.events import Observer

if TYPE_CHECKING:
    from fasttrain.studies.batch_study import BatchStudy
    from fasttrain.studies.options import Options
    from fasttrain.studies.settings_study import SettingsStudy

_SWEEP_SHARE = 0.5
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
TrialSecondsOption = Annotated[
    str, typer.Option("--trial-time", help="Time limit of one trial, such as 90s or 5m; a hung one is ended then.")
]


def tune_batch_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    run: RunOption = None,
    device: DeviceOption = "auto",
    prefer: PreferOption = "throughput",
    margin: MarginOption = 0.08,
    sizes: SizesOption = None,
    trials: TrialsOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Time for the sweep, such as 90s or 3m; else 1m on a CPU, none on a GPU."),
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
    options = _options(resolved, prefer, margin, sizes, trials, budget, trial_time)
    command = _Command(resolved, data, run, device, options, json, wide=False)
    with stop_on_signals() as stop:
        return command.study(stop)


def tune_command(
    recipe: RecipeOption,
    data: DataOption = None,
    assignments: SetOption = None,
    run: RunOption = None,
    device: DeviceOption = "auto",
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
        typer.Option("--caches", help="Kinds of data.cache to compare.", metavar="[KIND:]memory,gpu"),
    ] = None,
    trial_time: TrialSecondsOption = "2m",
    json: JsonOption = False,
) -> int:
    """Measure batch size, cache, loader and sliding window on this machine, then train with what is fastest.

    A range or number applies to all networks, or as KIND:VALUES (such as dynunet:1,2,4) to one network.kind; universal: is all.
    """
    from fasttrain.studies.options import read_numbers, read_words

    resolved = resolve(recipe, list(assignments or []))
    kind = resolved.recipe.network.kind
    options = replace(
        _options(resolved, prefer, margin, sizes, trials, budget, trial_time),
        window_batches=read_numbers("--window-batches", window_batches, kind),
        stitching=read_words("--stitching", stitching, kind, ("gpu", "cpu")),
        workers=read_numbers("--workers", workers, kind, least=0),
        prefetch=read_numbers("--prefetch", prefetch, kind),
        caches=read_words("--caches", caches, kind, ("none", "memory", "disk", "lmdb", "gpu")),
    )
    command = _Command(resolved, data, run, device, options, json, wide=True)
    with stop_on_signals() as stop:
        code = command.study(stop, told=no_train)
        return code if code or no_train else command.train(stop)


def _options(
    resolved: ResolvedRecipe,
    prefer: str,
    margin: float,
    sizes: list[str] | None,
    trials: list[str] | None,
    budget: str | None,
    trial_time: str,
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
    )


class _Command:
    """One of the two commands under way: where it writes, and what it has found."""

    def __init__(
        self,
        resolved: ResolvedRecipe,
        data: Path | None,
        run: Path | None,
        device: str,
        options: Options,
        json: bool,
        wide: bool,
    ) -> None:
        wants_gpu(device)
        self.resolved = resolved
        self.data = data
        self.device = device
        self.options = options
        self.json = json
        self.wide = wide
        self.folder = RunFolder(run if run is not None else new_run_path(resolved.recipe.name))
        self.folder.check_new()
        self.found: dict[str, Any] = {}
        self.batches: BatchStudy | None = None
        self.settings: SettingsStudy | None = None

    def study(self, stop: StopRequest, told: bool = True) -> int:
        """Runs the trials, and writes and prints what they found, also where they were stopped or one failed.

        told: the document goes to stdout, which else is the run's.
        """
        from fasttrain.studies.trials import TrialServer

        limit_threads(thread_count(self.resolved.recipe.acceleration.threads, probably_on_gpu(self.device))[0])
        stop.begun = True
        view = open_view(sys.stderr)
        try:
            server = TrialServer(self.folder.tune / "trials", view.on_event, stop)
            try:
                self._run(server, view)
            finally:
                server.close()
        except Stopped:
            view.close()
            self._report("stopped", told, stop.exit_code)
            print("fasttrain: stopped; the table holds what was measured until then", file=sys.stderr)
            return stop.exit_code
        except BaseException:
            view.close()
            if not self.json:
                self._report("failed", told)
            raise
        view.close()
        self._lock()
        self._report("done", told)
        return EXIT_DONE

    def train(self, stop: StopRequest) -> int:
        """The full run with what was found."""
        from fasttrain.cli.run_commands import _load_engine

        assert self.batches is not None
        tuned = self.batches.recipe_with(self.batches.settings)
        engine = _load_engine(self.device)
        view = open_view(sys.stderr)
        result = engine.train(
            tuned,
            data=self.data,
            run=self.folder.path,
            device=self.device,
            observers=[view],
            stop=stop,
            began=time.time(),
        )
        if self.json:
            print_json({"run": str(result.run), **result.summary, "tuned": self.found})
        return int(result.exit_code)

    def _run(self, server: Any, view: Observer) -> None:
        from fasttrain.studies.batch_study import BatchStudy
        from fasttrain.studies.measuring import Measuring
        from fasttrain.studies.settings_study import SettingsStudy

        share = _SWEEP_SHARE if self.wide else 1.0
        measuring = Measuring(self.data, self.device, server, self.options, view.on_event)
        self.batches = BatchStudy(self.resolved, measuring, share)
        self.batches.run()
        if self.wide:
            self.settings = SettingsStudy(self.batches)
            self.settings.run()

    def _lock(self) -> None:
        from fasttrain.studies.lock import lock_record, write_lock

        assert self.batches is not None
        more = {"command": "tune" if self.wide else "tune-batch", **self._document()}
        record = lock_record(self.resolved, self.batches.measuring.machine, self.batches.settings, more)
        cache = own_cache_folder()
        machine_lock = write_lock(record, self.folder.tune / "lock.json", cache)
        self.found = {**record, "machine_lock": str(machine_lock)}

    def _document(self) -> dict[str, Any]:
        batches, settings = self.batches, self.settings
        return {
            **(batches.document() if batches is not None else {}),
            **(settings.document() if settings is not None else {}),
        }

    def _report(self, status: str, told: bool, exit_code: int = EXIT_DONE) -> None:
        from fasttrain.cli.tune_table import print_batches, print_settings, print_settings_found
        from fasttrain.studies.picture import draw_sweep

        batches = self.batches
        document = {
            "status": status,
            "exit_code": exit_code,
            "recipe": self.resolved.recipe.name,
            "run": str(self.folder.path),
            **(self.found or self._document()),
            "settings": dict(batches.settings) if batches is not None else {},
            "machine": batches.measuring.machine if batches is not None else {},
        }
        if batches is not None and batches.points:
            write_json(self.folder.tune / "table.json", document)
            title = f"{self.resolved.recipe.name} on {batches.measuring.machine.get('device_name')}"
            picture = self.folder.tune / "batch.png"
            draw_sweep(batches.points, batches.chosen, picture, title, batches.measuring.machine.get("gpu_bytes"))
        if self.json:
            if told or status != "done":
                print_json(document)
            return
        if batches is not None:
            print_batches(batches)
        if self.settings is not None:
            print_settings(self.settings)
        if status == "done":
            lock = str(self.folder.tune / "lock.json")
            print_settings_found(document["settings"], [shlex.quote(lock), shlex.quote(self.found["machine_lock"])])
        sys.stdout.flush()
