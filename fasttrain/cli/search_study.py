"""Owns a search under way for the command line: what it says, how it ends, and its document."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.cli.printing import print_json, print_table, tell
from fasttrain.cli.search_text import rows_of
from fasttrain.cli.signals import stop_on_signals
from fasttrain.errors import EXIT_DONE, RecipeError, StorageError
from fasttrain.machine.hardware import wants_gpu

if TYPE_CHECKING:
    from fasttrain.engine.stop import StopRequest
    from fasttrain.recipe import ResolvedRecipe
    from fasttrain.studies.search.told import Told


def run_search(
    resolved: ResolvedRecipe,
    trials: int | None,
    hours: float | None,
    parallel: str | None,
    name: str | None,
    folder: Path | None,
    storage: str | None,
    data: Path | None,
    device: str,
    json: bool,
    began: float,
) -> int:
    """Runs trials until there are enough; prints how the study stands then, also where it was stopped."""
    from fasttrain.studies.search.beginning import (
        Asked,
        open_study,
        read_parallel,
        search_of,
        tell_overruled,
        trials_wanted,
        with_space,
    )
    from fasttrain.studies.search.extra import require_optuna
    from fasttrain.studies.search.pool import Pool

    require_optuna()
    wants_gpu(device)
    read_parallel(parallel)
    name = name or resolved.recipe.name
    place = folder or Path("runs") / f"search-{name}"
    asked = Asked(name, place, storage, data, device, parallel, hours)
    base, told = with_space(resolved)
    with stop_on_signals() as stop:
        stop.begun = True
        if told is not None:
            tell(told)
        tell_overruled(resolved, _tell)
        study = open_study(base, asked, _tell)
        count = trials_wanted(study, trials, _tell)
        stop.goes_on_with = "the same command"
        pool = Pool(study.folder.path / "logs")
        try:
            search_of(study, base, asked, count, pool, stop, _tell, began).run()
        finally:
            pool.close()
            _last_words(study.folder.path, storage, json, stop)
    return stop.exit_code if stop.asked else EXIT_DONE


def _tell(told: Told) -> None:
    level = "warning: " if told.level == "warning" else ""
    tell(f"{time.strftime('%H:%M:%S')} {level}{told.text}")


def _last_words(folder: Path, storage: str | None, json: bool, stop: StopRequest) -> None:
    """How the study stands; what cannot be told takes the place of no error."""
    from fasttrain.studies.search.pictures import write_pictures
    from fasttrain.studies.search.standing import standing_of
    from fasttrain.studies.search.study import open_kept
    from fasttrain.studies.search.study_folder import StudyFolder

    failed = sys.exc_info()[0] is not None
    try:
        kept = open_kept(StudyFolder(folder), storage)
        found = standing_of(kept)
        if not stop.asked:
            found["plots"] = [str(path) for path in write_pictures(kept)]
        if json and not failed:
            print_json(found)
        elif not json:
            print_table(rows_of(found))
    except (StorageError, RecipeError) as error:
        # The folder of a study that was there is not missing by a mistake in the command
        if not failed:
            raise StorageError(str(error)) from error
    if stop.asked:
        # Where it failed, that may be since it could not be saved
        how = "" if failed else "; what ran is saved: give the same command to go on"
        tell(f"fasttrain: stopped by {stop.reason}{how}")
        stop.has_told()
