"""Owns `monitor`: a run looked at from another terminal, from its files and the driver alone."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fasttrain.cli.monitor_text import lines_of, short_line
from fasttrain.cli.printing import print_json, print_table, tell
from fasttrain.errors import EXIT_DONE, RecipeError
from fasttrain.history.holder import is_held
from fasttrain.history.listing import is_run
from fasttrain.history.standing import RUNNING, UNSEEN
from fasttrain.history.watching import Watch
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import runs_by_age
from fasttrain.studies.search.study_folder import StudyFolder, newest_study
from fasttrain.telemetry.strict_json import plain

_AT_WORK = (RUNNING, UNSEEN)
_HEARTBEAT_SECONDS = 30.0


def monitor_command(
    run: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run or of a search; else the newest under ./runs.", metavar="[RUN]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and end.")] = False,
    every: Annotated[
        float, typer.Option("--every", help="Look again after so many seconds.", metavar="SECONDS", min=0.2, max=3600)
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="How it stands now, as one JSON document on stdout.")] = False,
) -> int:
    """Watch a run from another terminal: how far, how good, how fast, and what is left.

    It reads the run's files and asks the driver of its card, so that it disturbs nothing, and knows a run that was killed from
    one that is at work. It ends with the run; Ctrl-C ends it before.
    """
    if (study := _study(run)) is not None:
        from fasttrain.cli.search_monitor import watch_study

        return watch_study(study, once, every, json)
    folder = _chosen(run)
    watch = Watch(folder.path)
    try:
        if json:
            print_json(plain(watch.read()))
        elif once:
            print_table(lines_of(watch.read()))
        elif _redraws():
            from fasttrain.cli.monitor_view import watch_live

            watch_live(watch, every, _AT_WORK)
        else:
            _watch_plainly(watch, every)
    finally:
        watch.close()
    return EXIT_DONE


def _study(run: Path | None) -> StudyFolder | None:
    """The folder of a search, where that is named, or is newer than every run under ./runs."""
    if run is not None:
        return StudyFolder(run) if StudyFolder(run).holds_a_study() else None
    study = newest_study(Path("runs"))
    if study is None:
        return None
    newest = next(iter(runs_by_age()), None)
    began = None if newest is None else newest.began()
    return study if began is None or study.record.stat().st_mtime > began else None


def _chosen(run: Path | None) -> RunFolder:
    """Raises RecipeError where there is no run to be watched."""
    if run is not None:
        folder = RunFolder(run)
        if not is_run(folder):
            raise RecipeError(f"{run} holds no run; name a run folder, or see `fasttrain runs list`")
        return folder
    runs = runs_by_age()
    if not runs:
        raise RecipeError("there is no run under ./runs; name a run folder")
    newest, *older = runs
    if not is_held(newest):
        for other in older:
            if is_held(other):
                tell(f"{other.path} is at work: fasttrain monitor {other.path}")
    return newest


def _redraws() -> bool:
    from os import environ

    return sys.stdout.isatty() and environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def _watch_plainly(watch: Watch, every: float) -> None:
    """A line when an epoch is over or the status another, and one at least every half minute; at the end all that is known."""
    told: Any = None
    told_at = -_HEARTBEAT_SECONDS
    while (now := watch.read())["status"] in _AT_WORK:
        what = (now["status"], now["epochs_done"], now["fold"] and now["fold"]["number"])
        if what != told or time.monotonic() - told_at >= _HEARTBEAT_SECONDS:
            print(short_line(now), flush=True)
            told, told_at = what, time.monotonic()
        time.sleep(every)
    print_table(lines_of(now))
