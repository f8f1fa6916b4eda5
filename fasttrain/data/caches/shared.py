"""Owns volumes that the runs of one search share: kinds that keep volumes in memory then take them from the disk cache's entries.

A process asks for it once. What is not there yet is made and written there, so that every trial after the first one maps it; an
entry that cannot be written is a volume made in vain for the next run, and no fault of this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fasttrain.data.caches.disk import _read, _write
from fasttrain.data.caches.entry import pack
from fasttrain.data.caches.keys import key_of, place_of, settings_digest
from fasttrain.data.caches.storing import Findings, Options, make_folder, note_opening
from fasttrain.data.inventory.places import VOLUME_SUFFIX
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError, FasttrainError
from fasttrain.machine.folder_lock import hold
from fasttrain.samples import Case

Making = Callable[[Case], dict[str, Any]]
_FOLDER: list[Path] = []
"""Of this process: where the shared volumes lie; empty where none are shared."""
_HELD: dict[Path, Any] = {}


def share_volumes(folder: Path) -> None:
    """From now on runs of this process share volumes in `folder`."""
    _FOLDER[:] = [folder]


def stop_sharing() -> None:
    """Runs make their own volumes again."""
    _FOLDER.clear()
    while _HELD:
        _HELD.popitem()[1].release()


def shared_making(options: Options, cases: Iterable[Case], preprocess: Preprocess) -> Making:
    """Gives the record of a case: the shared one, else one that is made, and shared from then on."""
    make = options.making(preprocess)
    if not _FOLDER:
        return make
    settings = settings_digest(preprocess)
    folder = _FOLDER[0] / "disk" / settings
    try:
        make_folder(folder)
        note_opening(folder, list(cases), preprocess)
    except FasttrainError:
        return make
    # Held until the process ends, so that clearing the cache does not take it from under the search
    if folder not in _HELD:
        _HELD[folder] = hold(folder)

    def shared(case: Case) -> dict[str, Any]:
        path, key = folder / f"{place_of(case)}{VOLUME_SUFFIX}", key_of(settings, case)
        record = _read(path, key, Findings(1))
        if record is None:
            record = make(case)
            if key is None or key_of(settings, case) != key:
                raise DataError(f"case {case.name}: {case.images[0]} or its label changed while it was read; try again")
            with contextlib.suppress(FasttrainError):
                record = _write(path, pack(record, str(key)), str(key))
        return record

    return shared


def are_shared(work: Iterable[tuple[Case, Preprocess]]) -> bool:
    """Whether the volumes of all these cases lie there already, by their names."""
    if not _FOLDER:
        return False
    settings: dict[bool, str] = {}
    for case, preprocess in work:
        digest = settings.setdefault(preprocess.training, settings_digest(preprocess))
        if not (_FOLDER[0] / "disk" / digest / f"{place_of(case)}{VOLUME_SUFFIX}").exists():
            return False
    return True
