"""Owns the source that keeps all preprocessed volumes of a set in one LMDB database (in place of MONAI's LMDBDataset).

MONAI's class fills with one thread, drops the affine, gives a changed file another key and keeps the old volume for ever, and
raises for a value that cannot be read. Entries, keys and checks here are those of the disk cache. An access opens the database,
copies its entry out and closes it again (0.2 ms): an environment must not cross a fork, and py-lmdb refuses to open in a worker
what its parent still has open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.caches.entry import UnreadableEntryError, pack, unpack
from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.keys import key_of, place_of, settings_digest
from fasttrain.data.caches.storing import (
    Findings,
    Options,
    build_record,
    gather,
    make_folder,
    make_place,
    note_opening,
    unwritable,
)
from fasttrain.data.inventory.places import LMDB_DATA, LMDB_LOCK
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import MachineError
from fasttrain.machine.folder_lock import IN_USE, Hold, alone, hold
from fasttrain.samples import Case, Sample

# The most a database may ever hold. LMDB wants it beforehand; only what is written takes space (MONAI's figure as well).
_MOST_BYTES = 1 << 40
_MOST_READERS = 1024
_LOCKS: dict[str, threading.Lock] = {}
"""By path: within a process a database may be open once at a time."""


class LmdbCache:
    """Looks an entry up whenever it is asked for; processes and threads may share it.

    An entry that is gone or damaged meanwhile is preprocessed from its files, as without a cache; `held` keeps
    `fasttrain data cache --clean` from the database until the source is closed.
    """

    def __init__(
        self, path: Path, cases: Sequence[Case], keys: Sequence[str], preprocess: Preprocess, held: Hold
    ) -> None:
        self._path = path
        self._cases = tuple(cases)
        self._keys = tuple(keys)
        self._preprocess = preprocess
        self._held = held

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Sample:
        case = self._cases[index]
        record = self._kept(case, self._keys[index])
        return self._preprocess.as_sample(self._preprocess(case) if record is None else record)

    def _kept(self, case: Case, key: str) -> dict[str, Any] | None:
        lmdb = require_lmdb()
        try:
            with _environment(self._path, write=False) as environment:
                blob = _copied(environment, case)
            return None if blob is None else unpack(blob, key)
        except (lmdb.Error, UnreadableEntryError):
            return None

    def close(self) -> None:
        """Nothing but the lock of the folder is held between two accesses; the database stays for the next run."""
        self._held.release()


def require_lmdb() -> Any:
    """The module `lmdb`; raises MachineError where it is not installed."""
    try:
        import lmdb
    except ImportError as error:
        raise MachineError(
            "data.cache.kind: lmdb needs the package lmdb, which is not installed; install it by "
            "`pip install 'fasttrain[lmdb]'`, or set data.cache.kind: disk"
        ) from error
    return lmdb


def open_lmdb(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> LmdbCache:
    """Checks what is there and builds what is not, with `workers` threads, in a database under `options.folder`.

    Raises one DataError with the faults of all cases that had to be read, StorageError where the database cannot be written,
    and MachineError where the package lmdb is not installed.
    """
    require_lmdb()
    settings = settings_digest(preprocess)
    path = options.folder / "lmdb" / settings
    findings = Findings(len(cases))
    make_folder(path)
    _discard_damaged(path, cases, findings)
    try:
        keys, held = _filled(path, cases, settings, preprocess, workers, progress, findings)
    except _CorruptedError as error:
        # What the first look passed over: once more, with nothing of it
        findings = Findings(len(cases))
        _discard(path, f"is no sound database ({error})", findings)
        try:
            keys, held = _filled(path, cases, settings, preprocess, workers, progress, findings)
        except _CorruptedError as again:
            raise unwritable(path, 0, str(again)) from again
    findings.tell("lmdb", path, options.told)
    return LmdbCache(path, cases, keys, preprocess, held)


class _CorruptedError(Exception):
    """LMDB met a page that is none of its own; the text is LMDB's."""


def _filled(
    path: Path,
    cases: Sequence[Case],
    settings: str,
    preprocess: Preprocess,
    workers: int,
    progress: Progress | None,
    findings: Findings,
) -> tuple[list[str], Hold]:
    """The keys of all cases, whose entries are in the database then, and the lock of its folder."""
    lmdb = require_lmdb()

    def kept(environment: Any, case: Case) -> str:
        key = key_of(settings, case)
        if key is not None and (there := _there(environment, path, case, key, findings)) is not None:
            findings.was_there()
            findings.holds(there)
            return key
        record = build_record(case, key, settings, preprocess)
        blob = b"".join(pack(record, str(key)))
        try:
            with environment.begin(write=True) as transaction:
                transaction.put(_place(case), blob)
        except lmdb.Error as error:
            raise _as_ours(error, path, len(blob)) from error
        findings.holds(record)
        return str(key)

    def told(environment: Any, case: Case) -> str:
        try:
            return kept(environment, case)
        except lmdb.Error as error:
            raise _as_ours(error, path) from error

    held = hold(path)
    try:
        note_opening(path, cases, preprocess)
        with contextlib.ExitStack() as stack:
            try:
                environment = stack.enter_context(_environment(path, write=True))
                environment.reader_check()
            except lmdb.Error as error:
                raise _as_ours(error, path) from error
            keys = gather(cases, lambda case: told(environment, case), workers, progress)
            entries = environment.stat()["entries"]
    except BaseException:
        held.release()
        raise
    note_opening(path, cases, preprocess, entries)
    return keys, held


def _as_ours(error: Exception, path: Path, needed_bytes: int = 0) -> Exception:
    lmdb = require_lmdb()
    damages = (
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.InvalidError,
        lmdb.PageFullError,
        lmdb.CursorFullError,
        lmdb.BadTxnError,
    )
    if isinstance(error, damages):
        return _CorruptedError(str(error))
    return unwritable(path, needed_bytes, _reason(error, path, needed_bytes))


@contextlib.contextmanager
def _environment(path: Path, write: bool) -> Iterator[Any]:
    """The database, open for this process. One that may not be written is read without locks, as nobody changes it."""
    lmdb = require_lmdb()
    writable = os.access(path, os.W_OK)
    with _LOCKS.setdefault(str(path), threading.Lock()):
        environment = lmdb.open(
            str(path),
            map_size=_MOST_BYTES,
            readonly=not (write and writable),
            lock=writable,
            # A power cut may lose the last entry but not the ones before it
            metasync=False,
            max_readers=_MOST_READERS,
        )
        try:
            yield environment
        finally:
            environment.close()


def _place(case: Case) -> bytes:
    return place_of(case).encode()


def _copied(environment: Any, case: Case) -> np.ndarray | None:
    """Copied, since the map ends with the environment."""
    with environment.begin(buffers=True) as transaction:
        value = transaction.get(_place(case))
        if value is None:
            return None
        return np.frombuffer(value, np.uint8).copy()


def _there(environment: Any, path: Path, case: Case, key: str, findings: Findings) -> dict[str, Any] | None:
    blob = _copied(environment, case)
    try:
        return None if blob is None else unpack(blob, key)
    except UnreadableEntryError as error:
        findings.was_unreadable(f"the entry of case {case.name} in {path} {error}")
        return None


def _discard_damaged(path: Path, cases: Sequence[Case], findings: Findings) -> None:
    """Moves a database that LMDB cannot read out of the way in one piece, and deletes it."""
    if os.access(path, os.W_OK):
        for name in (LMDB_DATA, LMDB_LOCK):
            # LMDB would write through a link
            make_place(path / name)
    if _damage(path, cases) is None:
        return
    with alone(path) as why:
        # Another program that begins the database at this moment has not written its first pages yet; of one in use that is
        # damaged all the same, LMDB will tell
        damage = _damage(path, cases) if why != IN_USE else None
        if damage is not None:
            _discard(path, damage, findings)
    make_folder(path)


def _discard(path: Path, damage: str, findings: Findings) -> None:
    findings.was_unreadable(f"the lmdb cache {path} {damage}")
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.damaged")
    try:
        path.rename(aside)
    except OSError as error:
        raise unwritable(path, 0, error.strerror or str(error)) from error
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(path)


def _damage(path: Path, cases: Sequence[Case]) -> str | None:
    """What is wrong with the database, in a few words."""
    lmdb = require_lmdb()
    file = path / LMDB_DATA
    try:
        length = file.stat().st_size
        if length < 2 * os.sysconf("SC_PAGE_SIZE"):
            return "is cut off"  # LMDB maps its first two pages without asking whether they are there
        with _environment(path, write=False) as environment:
            if length < (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]:
                return "is cut off"  # a page that is not there would end the process by SIGBUS
            with environment.begin() as transaction, transaction.cursor() as cursor:
                for case in cases:
                    cursor.set_key(_place(case))
    except FileNotFoundError:
        return None
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
        return f"is no sound database ({type(error).__name__})"
    except (OSError, lmdb.Error) as error:
        # py-lmdb has no class for a format that it does not know; of all else opening to write says more
        return "is in a format of another LMDB" if "not supported by this build" in str(error) else None
    return None


def _reason(error: Exception, path: Path, needed_bytes: int) -> str:
    """LMDB calls a full disk an input/output error."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(path).free < needed_bytes:
            return os.strerror(errno.ENOSPC)
    return str(error)
