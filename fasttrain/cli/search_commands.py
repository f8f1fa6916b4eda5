"""Owns `search run | status | best`: their options, and what is asked by them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fasttrain.cli.run_commands import DataOption, DeviceOption, JsonOption, RecipeOption, SetOption
from fasttrain.errors import EXIT_DONE, RecipeError, StorageError
from fasttrain.recipe import resolve

_EPILOG = "Add --debug for a traceback."
search_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Folder of the study; else ./runs/search-NAME.", metavar="DIR")
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        help="sqlite (default), journal (for network disks), a file that ends in .db or .log, or a URL of PostgreSQL or MySQL.",
    ),
]
StudyArgument = Annotated[
    Path | None, typer.Argument(help="Folder of a study; else the newest under ./runs.", metavar="[STUDY]")
]


@search_app.command("run", epilog=_EPILOG)
def run_command(
    recipe: RecipeOption,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Trials of the whole study; else search.trials.", min=1)
    ] = None,
    hours: Annotated[
        float | None, typer.Option("--hours", help="End after so many hours; what runs is saved and goes on later.")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            "--parallel",
            help="Trials at once on the device; auto measures one and two (default on a GPU; else 1).",
            metavar="N|auto",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the study; else the recipe's.")] = None,
    folder: FolderOption = None,
    storage: StorageOption = None,
    data: DataOption = None,
    assignments: SetOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> int:
    """Search hyper-parameters: trials of a recipe, each an ordinary run, hopeless ones ended early.

    The recipe's `search` section names the values to search, the sampler and the pruner (`fasttrain recipes keys search`);
    without one a space of the task's own is searched. The same command goes on with a study that was interrupted; given on
    several machines with one --storage, they share it.
    """
    from fasttrain.cli.search_study import run_search

    if hours is not None and not 0 < hours < 1e6:
        raise RecipeError(f"--hours {hours:g}: should be a number above 0")
    resolved = resolve(recipe, list(assignments or []))
    return run_search(resolved, trials, hours, parallel, name, folder, storage, data, device, json, began=time.time())


@search_app.command("status", epilog=_EPILOG)
def status_command(study: StudyArgument = None, storage: StorageOption = None, json: JsonOption = False) -> int:
    """Tell how a study stands: trials by state, pruning, the best so far, importance, what the device did; and draw it."""
    from fasttrain.cli.printing import print_json, print_table, tell
    from fasttrain.cli.search_text import rows_of
    from fasttrain.studies.search.pictures import write_pictures
    from fasttrain.studies.search.standing import standing_of
    from fasttrain.studies.search.study import open_kept

    kept = open_kept(study_folder(study), storage)
    found = standing_of(kept)
    try:
        found["plots"] = [str(path) for path in write_pictures(kept)]
    except StorageError as error:
        tell(f"fasttrain: {error}")
    if json:
        print_json(found)
    else:
        print_table(rows_of(found))
    return EXIT_DONE


@search_app.command("best", epilog=_EPILOG)
def best_command(
    study: StudyArgument = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="New recipe file of the winner.", metavar="FILE")
    ] = None,
    storage: StorageOption = None,
    json: JsonOption = False,
) -> int:
    """Tell the best trial of a study, and write a recipe of it."""
    from fasttrain.cli.printing import print_json, print_table
    from fasttrain.cli.search_text import best_rows
    from fasttrain.studies.search.standing import best_trials
    from fasttrain.studies.search.study import open_kept
    from fasttrain.studies.search.winner import write_winner

    kept = open_kept(study_folder(study), storage)
    best = best_trials(kept)
    if not best:
        raise RecipeError(
            f"no trial of study {kept.name} has ended with a score yet; `fasttrain search status` tells how it stands"
        )
    metric = kept.optuna.user_attrs.get("fasttrain_metric")
    document: dict[str, Any] = {"study": str(kept.folder.path), "metric": metric, "best": best, "written": None}
    if write is not None:
        document["written"] = str(write_winner(kept, best[0], write))
    if json:
        print_json(document)
    else:
        print_table(best_rows(document))
    return EXIT_DONE


def study_folder(asked: Path | None) -> Any:
    """Raises RecipeError where there is no study."""
    from fasttrain.studies.search.study_folder import StudyFolder, newest_study

    if asked is not None:
        return StudyFolder(asked)
    found = newest_study(Path("runs"))
    if found is None:
        raise RecipeError("there is no study under ./runs; name its folder, or begin one with `fasttrain search run`")
    return found
