"""Owns reading many files with threads: what is remembered is not read again, and an end that is asked for is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from fasttrain.data.checking.facts import FileFacts, View, read_facts
from fasttrain.data.checking.patients import SUFFIXES, patient_facts
from fasttrain.data.checking.remembered import Remembered, stamp_of

Progress = Callable[[int, int], None]
"""Takes (files done, files in all), always from the thread that began the pass."""
Wanted = tuple[Path, View]

_SECONDS_BETWEEN_SAVES = 30.0


def facts_of(
    wanted: Sequence[Wanted], remembered: Remembered, workers: int, full: bool, progress: Progress | None
) -> tuple[dict[Wanted, FileFacts], int]:
    """The facts of every file, and how many files were read for them; with `full` all, else those that are not remembered.

    A worker holds one volume at a time. What `progress` raises ends the pass once the files under way are read, and what was
    found until then is remembered.
    """
    distinct = list(dict.fromkeys(wanted))
    known = {} if full else {one: facts for one in distinct if (facts := remembered.facts(*one)) is not None}
    # The largest first, so that no worker is left alone with one at the end
    rest = sorted((one for one in distinct if one not in known), key=_size, reverse=True)
    saved = time.monotonic()
    if progress is not None:
        progress(len(known), len(distinct))
    with ThreadPoolExecutor(max(workers, 1), thread_name_prefix="check") as pool:
        futures: dict[Future[tuple[FileFacts, list[int] | None]], Wanted] = {}
        try:
            futures = {pool.submit(_read, *one): one for one in rest}
            for future in as_completed(futures):
                one = futures[future]
                facts, stamp = future.result()
                known[one] = facts
                remembered.note(*one, stamp, facts)
                if progress is not None:
                    progress(len(known), len(distinct))
                if time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
                    remembered.save()
                    saved = time.monotonic()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            remembered.save()
            raise
    return known, len(rest)


def _read(path: Path, view: View) -> tuple[FileFacts, list[int] | None]:
    stamp = stamp_of(path, view.drawn)
    # No other image or label ends so
    return (patient_facts(path) if path.suffix in SUFFIXES else read_facts(path, view)), stamp


def _size(wanted: Wanted) -> int:
    path, view = wanted
    stamp = stamp_of(path, view.drawn)
    return stamp[0] if stamp is not None else 0
