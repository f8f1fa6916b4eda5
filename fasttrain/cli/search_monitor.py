"""Owns `monitor` of a search: how the study stands and what its trials are at, until there are as many as wanted."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from fasttrain.cli.monitor_text import short_line
from fasttrain.cli.printing import print_json, print_table
from fasttrain.cli.search_text import rows_of, short_rows
from fasttrain.errors import EXIT_DONE
from fasttrain.history.watching import Watch
from fasttrain.run_folder import RunFolder
from fasttrain.studies.search.processes import any_at_work
from fasttrain.studies.search.standing import running_runs, standing_of
from fasttrain.studies.search.study import Kept, open_kept
from fasttrain.studies.search.study_folder import StudyFolder
from fasttrain.telemetry.strict_json import plain

_HEARTBEAT_SECONDS = 30.0
_LEAST_SECONDS = 2.0
"""A storage is not asked more often."""


def watch_study(folder: StudyFolder, once: bool, every: float, json: bool) -> int:
    """Prints how it stands now, or a line whenever something changed and every half minute, until nothing is at work."""
    kept = open_kept(folder)
    if json or once:
        found = _read(kept)
        if json:
            print_json(plain(found))
        else:
            print_table(rows_of(found) + _at_work(found))
        return EXIT_DONE
    told: Any = None
    told_at = -_HEARTBEAT_SECONDS
    while (found := _read(kept))["states"]["running"]["count"] > len(found["dead"]) or any_at_work(folder):
        now = {state: one["count"] for state, one in found["states"].items()}
        if now != told or time.monotonic() - told_at >= _HEARTBEAT_SECONDS:
            print(short_rows(found), flush=True)
            for _, line in _at_work(found):
                print(f"  {line}", flush=True)
            told, told_at = now, time.monotonic()
        time.sleep(max(every, _LEAST_SECONDS))
    print_table(rows_of(found))
    return EXIT_DONE


def _read(kept: Kept) -> dict[str, Any]:
    found = standing_of(kept)
    runs = []
    for number, path in running_runs(kept):
        if not RunFolder(path).events.exists():
            continue
        watch = Watch(path)
        with contextlib.closing(watch):
            runs.append({"trial": number, **watch.read()})
    return {**found, "at_work": runs}


def _at_work(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [("at work", f"trial {run['trial']}: {short_line(run)}") for run in found["at_work"]]
