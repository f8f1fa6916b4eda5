"""Owns where preprocessed volumes are kept: one kind a file, by the `kind` of `data.cache`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fasttrain.data.caches.disk import open_disk
from fasttrain.data.caches.estimate import build_bytes, estimate_bytes, estimate_shapes
from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.lmdb import open_lmdb, require_lmdb
from fasttrain.data.caches.memory import open_memory
from fasttrain.data.caches.none import open_none
from fasttrain.data.caches.smart import SmartCache, Window, open_smart
from fasttrain.data.caches.storing import Options, Told
from fasttrain.data.caches.together import MadeTogether, can_make_together
from fasttrain.data.inventory import volumes_folder
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.outcomes import one_outcome
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.samples import Case, CaseSource

CACHES: dict[str, Callable[[Sequence[Case], Preprocess, int, Progress | None, Options], CaseSource]] = {
    "none": open_none,
    "memory": open_memory,
    "disk": open_disk,
    "lmdb": open_lmdb,
    "smart": open_smart,
}
_STORED = ("disk", "lmdb")

__all__ = [
    "CACHES",
    "MadeTogether",
    "Progress",
    "SmartCache",
    "Told",
    "Window",
    "build_bytes",
    "estimate_bytes",
    "estimate_shapes",
    "made_together",
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
    ahead: MadeAhead | None = None,
    ranks: Ranks = ONLY_ONE,
) -> CaseSource:
    """Opens the cache `kind` (a key of `CACHES`; the plan resolves `auto`) over `cases`.

    What the kind keeps has been read when it returns, or lay in the cache unchanged; otherwise one DataError lists the faults of
    all cases that were read. `none` reads nothing beforehand, and `smart` its first window alone: the cases are to be checked
    before. `workers` threads do it, and `progress` is told (done, total) from them, one call at a time. `folder` is where `disk`
    and `lmdb` store (default: `volumes_folder` for runs in ./runs), `told` hears what was found there and what the volumes take,
    and `epoch` (from 0) is the one whose window `smart` keeps first; `memory` and `none` take volumes that are made `ahead`.
    Where nothing is trained on, `smart` has no epochs to move by, and keeps nothing.

    All `ranks` of a run call it alike, and have the same errors. Those of a machine make each case once: of `memory` each makes a
    share, and all map one copy; what is stored is filled by the first of them; of `smart` each keeps cases of its own.
    """
    if kind == "smart" and not preprocess.training:
        kind = "none"
    place = folder or volumes_folder(preprocess.data.cache, os.environ, Path("runs"))
    options = Options(place, told, epoch, ahead, ranks)
    opened = functools.partial(CACHES[kind], cases, preprocess, workers)
    if kind not in _STORED or ranks.place.alone:
        return one_outcome(ranks.gather, lambda: opened(progress, options), _close)
    fills = ranks.place.local_rank == 0
    first = one_outcome(ranks.gather, lambda: opened(progress, options) if fills else None, _close)
    quiet = replace(options, told=None)
    return one_outcome(ranks.gather, lambda: opened(None, quiet) if first is None else first, _close)


def made_together(
    cases: Sequence[Case],
    preprocess: Preprocess,
    ranks: Ranks,
    ahead: MadeAhead | None = None,
    told: Told | None = None,
) -> MadeTogether | None:
    """Cases that are taken once, as they are made by all ranks of this machine; None where each has to make them by itself."""
    if not can_make_together(ranks, told):
        return None
    return MadeTogether(cases, preprocess, Options(Path(), told, ahead=ahead, ranks=ranks))


def _close(source: CaseSource | None) -> None:
    if source is not None:
        source.close()
