"""Owns a study under way for the command line: its table and lock, written and printed, and the run with what was found."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.printing import print_json, tell
from fasttrain.cli.views import open_view
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DONE, StorageError, exit_code_of
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.hardware import wants_gpu
from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import make_new_run_path, new_run_path
from fasttrain.telemetry.events import Observer
from fasttrain.whole_files import write_json

if TYPE_CHECKING:
    from fasttrain.engine.limits import Limits
    from fasttrain.recipe import ResolvedRecipe
    from fasttrain.studies.batch_study import BatchStudy
    from fasttrain.studies.options import Options
    from fasttrain.studies.settings_study import SettingsStudy

_SWEEP_SHARE = 0.5


class TuneStudy:
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
        self.named = run is not None
        self.folder = RunFolder(run if run is not None else new_run_path(resolved.recipe.name))
        self.folder.check_new()
        self.found: dict[str, Any] = {}
        self.batches: BatchStudy | None = None
        self.settings: SettingsStudy | None = None

    def study(self, stop: StopRequest, told: bool = True) -> int:
        """Runs the trials, and writes and prints what they found, also where they were stopped or one failed.

        told: the document goes to stdout, which else is the run's.
        """
        from fasttrain.studies.lock import check_place

        check_place(own_cache_folder())
        self._take_folder()
        try:
            return self._study(stop, told)
        finally:
            self.folder.release()

    def _take_folder(self) -> None:
        """Makes the run's folder and claims it; a second study never writes into it, also where both begin in one second."""
        if not self.named:
            self.folder = RunFolder(make_new_run_path(self.resolved.recipe.name, self.folder.path))
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run folder {self.folder.path} cannot be made: {error.strerror}; choose another with --run"
            ) from error
        self.folder.claim()

    def _study(self, stop: StopRequest, told: bool) -> int:
        from fasttrain.studies.trials import TrialServer

        threads, ranks = self.resolved.recipe.acceleration.threads, self.options.ranks
        limit_threads(thread_count(threads, probably_on_gpu(self.device), ranks)[0])
        stop.begun = True
        view = open_view(sys.stderr)
        try:
            server = TrialServer(self.folder.tune / "trials", view.on_event, stop)
            try:
                self._run(server, view)
            finally:
                server.close()
            self._lock()
        except Stopped:
            view.close()
            self._write("stopped", stop.exit_code)
            self._print("stopped", stop.exit_code)
            tell("fasttrain: stopped; the table holds what was measured until then")
            return stop.exit_code
        except BaseException as error:
            view.close()
            # A disk that is full already must not take the place of the first error
            with contextlib.suppress(StorageError):
                self._write("failed", exit_code_of(error))
            if not self.json:
                self._print("failed")
            raise
        view.close()
        self._write("done")
        if told or not self.json:
            self._print("done")
        return EXIT_DONE

    @property
    def found_settings(self) -> dict[str, Any]:
        """{key: value} that was found, as far as the study came."""
        return dict(self.batches.settings) if self.batches is not None else {}

    def train(self, stop: StopRequest, limits: Limits) -> int:
        """The full run with what was found; its hours and cost are counted from the process's start on."""
        from fasttrain.cli.run_commands import _load_engine, _stopped, process_start

        assert self.batches is not None
        tuned = self.batches.recipe_with(self.batches.settings)
        engine = _load_engine(self.device)
        view = open_view(sys.stderr)
        try:
            result = engine.train(
                tuned,
                data=self.data,
                run=self.folder.path,
                device=self.device,
                observers=[view, ON_FINISH],
                stop=stop,
                began=time.time(),
                paid_since=process_start(),
                limits=limits,
                asked=self.resolved.recipe,
            )
        except Stopped:
            return _stopped(stop, self.json)
        if self.json:
            print_json({"run": str(result.run), **result.summary, "tuned": self.found})
        return int(result.exit_code)

    def _run(self, server: Any, view: Observer) -> None:
        from fasttrain.studies.batch_study import BatchStudy
        from fasttrain.studies.measuring import Measuring
        from fasttrain.studies.settings_study import SettingsStudy
        from fasttrain.studies.turns import told_of_others

        share = _SWEEP_SHARE if self.wide else 1.0
        measuring = Measuring(self.data, self.device, server, self.options, view.on_event)
        self.batches = BatchStudy(self.resolved, measuring, share, self._keep)
        measuring.look(self.resolved)
        with told_of_others(own_cache_folder(), measuring.machine, view.on_event, measuring.ranks):
            self.batches.run()
            if self.wide:
                self.settings = SettingsStudy(self.batches)
                self.settings.run()

    def _lock(self) -> None:
        from fasttrain.studies.lock import lock_record, write_lock

        assert self.batches is not None
        more = {"command": "tune" if self.wide else "tune-batch", **self._document()}
        measuring = self.batches.measuring
        record = lock_record(self.resolved, measuring.machine, self.batches.settings, more, measuring.ranks)
        cache = own_cache_folder()
        machine_lock = write_lock(record, self.folder.tune / "lock.json", cache)
        self.found = {**record, "machine_lock": str(machine_lock)}

    def _document(self) -> dict[str, Any]:
        batches, settings = self.batches, self.settings
        return {
            **(batches.document() if batches is not None else {}),
            **(settings.document() if settings is not None else {}),
        }

    def _state(self, status: str, exit_code: int) -> dict[str, Any]:
        batches = self.batches
        return {
            "status": status,
            "exit_code": exit_code,
            "recipe": self.resolved.recipe.name,
            "run": str(self.folder.path),
            **(self.found or self._document()),
            "settings": dict(batches.settings) if batches is not None else {},
            "machine": batches.measuring.machine if batches is not None else {},
        }

    def _keep(self) -> None:
        """After each trial, so that a process which is killed leaves the table so far."""
        write_json(self.folder.tune / "table.json", self._state("running", EXIT_DONE))

    def _write(self, status: str, exit_code: int = EXIT_DONE) -> None:
        from fasttrain.studies.picture import draw_sweep

        batches = self.batches
        if batches is not None and batches.points:
            write_json(self.folder.tune / "table.json", self._state(status, exit_code))
            times = f"{self.options.ranks} × " if self.options.ranks > 1 else ""
            title = f"{self.resolved.recipe.name} on {times}{batches.measuring.machine.get('device_name')}"
            picture = self.folder.tune / "batch.png"
            draw_sweep(batches.points, batches.chosen, picture, title, batches.measuring.machine.get("gpu_bytes"))

    def _print(self, status: str, exit_code: int = EXIT_DONE) -> None:
        from fasttrain.cli.tune_table import print_batches, print_settings, print_settings_found

        if self.json:
            print_json(self._state(status, exit_code))
            return
        if self.batches is not None:
            print_batches(self.batches)
        if self.settings is not None:
            print_settings(self.settings)
        if status == "done":
            assert self.batches is not None
            lock = str(self.folder.tune / "lock.json")
            places = [shlex.quote(lock), shlex.quote(self.found["machine_lock"])]
            print_settings_found(self.batches.settings, places, self.options.ranks)
        sys.stdout.flush()
