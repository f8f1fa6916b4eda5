"""Owns the source that keeps every preprocessed volume in a file of its own, and maps it (in place of MONAI's PersistentDataset).

MONAI's class serves a stale entry after the file or a setting changed, ends on a truncated one, moves entries into place by a
copy where the temporary folder is on another disk, unpickles metadata and drops the affine. Here an entry has its key inside,
is checked whole when the source opens, and appears under its name by a rename. From then on it is mapped: the system keeps in
memory what patches touch, workers share it, and an entry that is deleted or replaced meanwhile stays as it was for this run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from fasttrain.data.inventory.places import VOLUME_SUFFIX
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.folder_lock import hold
from fasttrain.samples import Case, Sample


class DiskCache:
    """Records whose tensors are private maps of files; a write to one would change neither the file nor another process."""

    def __init__(self, records: list[dict[str, Any]], preprocess: Preprocess) -> None:
        self._records = records
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        return self._preprocess.as_sample(self._records[index])

    def close(self) -> None:
        """Gives the maps back; the files stay for the next run."""
        self._records = []


def open_disk(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> DiskCache:
    """Maps what is there and builds what is not, with `workers` threads, under `options.folder`.

    Raises one DataError with the faults of all cases that had to be read, and StorageError where an entry cannot be written.
    """
    settings = settings_digest(preprocess)
    folder = options.folder / "disk" / settings
    make_folder(folder)
    findings = Findings(len(cases))

    def kept(case: Case) -> dict[str, Any]:
        path, key = folder / f"{place_of(case)}{VOLUME_SUFFIX}", key_of(settings, case)
        record = _read(path, key, findings)
        if record is not None:
            findings.was_there()
        else:
            record = _write(path, pack(build_record(case, key, settings, preprocess), str(key)), str(key))
        findings.holds(record)
        return record

    # Released once all is mapped: what is cleared from then on stays as it was for this run
    held = hold(folder)
    try:
        _tidy(folder)
        note_opening(folder, cases, preprocess)
        source = DiskCache(gather(cases, kept, workers, progress), preprocess)
    finally:
        held.release()
    findings.tell("disk", folder, options.told)
    return source


def _read(path: Path, key: str | None, findings: Findings) -> dict[str, Any] | None:
    """None where there is no entry, or one of other files or settings, or one that cannot be read."""
    if key is None or not os.path.lexists(path):
        return None
    try:
        return unpack(_map(path), key)
    except FileNotFoundError:
        return None
    except UnreadableEntryError as error:
        findings.was_unreadable(f"cache entry {path} {error}")
    except (OSError, RuntimeError) as error:
        findings.was_unreadable(f"cache entry {path} cannot be read ({_first_line(error)})")
    return None


def _map(path: Path) -> np.ndarray:
    # torch's own map closes the file again; mmap.mmap would hold a descriptor a case, and 256 are allowed on many machines
    seen = os.lstat(path)
    if not stat.S_ISREG(seen.st_mode):
        raise UnreadableEntryError("is no regular file")
    size = seen.st_size
    if size == 0:
        raise UnreadableEntryError("is empty")
    tensor = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    # By way of NumPy, since torch believes that it can send a tensor of a mapped file to a process by its descriptor
    return tensor.numpy()


def _write(path: Path, pieces: Sequence[bytes | memoryview], key: str) -> dict[str, Any]:
    """Writes an entry and gives its record, mapped and checked before the entry appears under its name.

    Not synchronised with the disk: an entry that a power cut spoils fails its checksum and is built anew.
    """
    make_place(path)
    try:
        with _part(path) as (temporary, stream):
            for piece in pieces:
                stream.write(piece)
            record = unpack(_map(temporary), key)
            assert record is not None
            os.replace(temporary, path)
            return record
    except OSError as error:
        raise unwritable(path, sum(len(piece) for piece in pieces), error.strerror or str(error)) from error
    except (RuntimeError, UnreadableEntryError) as error:
        raise unwritable(path, 0, f"what was written does not read back ({_first_line(error)})") from error


@contextlib.contextmanager
def _part(path: Path) -> Iterator[tuple[Path, _Whole]]:
    """A file beside `path` that is locked while it is written, so that another process can tell it from a dead one's."""
    while True:
        # Neither the process's number nor its host's name would do: containers that share a disk may have both alike
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            # Unbuffered: what a full disk refused must not be tried again when the file is closed
            with open(temporary, "xb", buffering=0) as stream:
                with contextlib.suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_EX)
                # Between open and lock another process may have taken it for a dead one's
                if os.fstat(stream.fileno()).st_nlink:
                    yield temporary, _Whole(stream)
                    return
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


class _Whole:
    """Writes all it is given: an unbuffered file may take a part and say so only in its return value."""

    def __init__(self, stream: FileIO) -> None:
        self._stream = stream

    def write(self, piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        while len(rest):
            rest = rest[self._stream.write(rest) :]


def _tidy(folder: Path) -> None:
    """Removes what killed processes left half written."""
    for left in folder.glob(".*.part"):
        # Without waiting, should it be a pipe
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError), open(os.open(left, flags), "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
