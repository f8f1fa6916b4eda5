"""Owns where preprocessed volumes are kept: one kind a file, by the `kind` of `data.cache`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fasttrain.data.caches.disk import open_disk
from fasttrain.data.caches.estimate import estimate_bytes
from fasttrain.data.caches.filling import Progress, check_cases
from fasttrain.data.caches.lmdb import open_lmdb, require_lmdb
from fasttrain.data.caches.memory import open_memory
from fasttrain.data.caches.none import open_none
from fasttrain.data.caches.smart import SmartCache, Window, open_smart
from fasttrain.data.caches.storing import Options, Told
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.cache_folder import cache_folder
from fasttrain.recipe.data_spec import CacheSpec
from fasttrain.samples import Case, CaseSource

CACHES: dict[str, Callable[[Sequence[Case], Preprocess, int, Progress | None, Options], CaseSource]] = {
    "none": open_none,
    "memory": open_memory,
    "disk": open_disk,
    "lmdb": open_lmdb,
    "smart": open_smart,
}

__all__ = [
    "CACHES",
    "Progress",
    "SmartCache",
    "Told",
    "Window",
    "check_cases",
    "estimate_bytes",
    "open_case_source",
    "require_lmdb",
    "volumes_folder",
]


def open_case_source(
    kind: str,
    cases: Sequence[Case],
    preprocess: Preprocess,
    workers: int,
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    told: Told | None = None,
    epoch: int = 0,
) -> CaseSource:
    """Opens the cache `kind` (a key of `CACHES`; the plan resolves `auto`) over `cases`.

    Every case has been read and checked when it returns, or lay in the cache unchanged; otherwise one DataError lists the faults
    of all. `workers` threads do it, and `progress` is told (done, total) from them, one call at a time. `folder` is where `disk`
    and `lmdb` store (default: `volumes_folder` for runs in ./runs), `told` hears what was found there, and `epoch` (from 0) is
    the one whose window `smart` keeps first. Where nothing is trained on, `smart` has no epochs to move by, and keeps nothing.
    """
    if kind == "smart" and not preprocess.training:
        kind = "none"
    place = folder or volumes_folder(preprocess.data.cache, os.environ, Path("runs"))
    return CACHES[kind](cases, preprocess, workers, progress, Options(place, told, epoch))


def volumes_folder(spec: CacheSpec, environ: Mapping[str, str], runs: Path) -> Path:
    """Where volumes are stored: `data.cache.folder`, else `volumes` in fasttrain's cache folder for runs that lie in `runs`."""
    if spec.folder is not None:
        return Path(spec.folder).expanduser().absolute()
    return cache_folder(environ, runs)[0] / "volumes"
