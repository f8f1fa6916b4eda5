"""Owns how files get where they belong whole or not at all, and JSON documents so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fasttrain.errors import StorageError

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_HALF = re.compile(r"\.(.+)\.(\d+)\.part\Z", re.DOTALL)
_HALF_MADE: set[tuple[int, Path]] = set()
"""What is being made, with the process that makes it: a forked one inherits the others'."""


@contextlib.contextmanager
def half_made(path: Path) -> Iterator[None]:
    """In the scope `path`, a file or folder, is being made: it is removed at the end, and where a signal ends the process."""
    entry = (os.getpid(), path)
    _HALF_MADE.add(entry)
    try:
        yield
    finally:
        remove_left(path)
        _HALF_MADE.discard(entry)


def remove_half_made() -> None:
    """For a process that ends at once, without leaving the scopes that it is in."""
    for process, path in list(_HALF_MADE):
        if process == os.getpid():
            remove_left(path)


def remove_left(path: Path) -> None:
    """Removes a file or a folder, as far as that can be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def write_whole(path: Path, before_rename: Callable[[Path], None] = lambda temporary: None) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is complete and on the disk: temp file, fsync, rename.

    before_rename: is given the complete temporary file, whose size and time of change stay its own. Raises StorageError that
    names the path and the free bytes; what was there before stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with half_made(temporary), open(temporary, "wb") as stream:
            _lock(stream)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            before_rename(temporary)
            # Still locked, so that nobody takes it for a half
            os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}{told_free(path.parent)}") from error


def remove_halves_of(folder: Path, names: Iterable[str]) -> None:
    """Removes what `write_whole` left of files of these names in a process that was killed; of one that is at work it stays."""
    wanted = set(names)
    for name in os.listdir(folder):
        match = _HALF.match(name)
        if match and match[1] in wanted and int(match[2]) != os.getpid():
            with contextlib.suppress(OSError), open(folder / name, "r+b") as stream:
                if _lock(stream):
                    os.unlink(folder / name)


def _lock(stream: IO[bytes]) -> bool:
    """A record lock, which no process inherits and which ends with this one; not every disk has them."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def ends_within_a_line(path: Path) -> bool:
    """Whether the last line of a file that is there was never ended, as by a process that was killed or a disk that was full."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON document whole; non-finite numbers are refused by the caller's own record, not written as NaN."""
    with write_whole(path) as stream:
        stream.write(
            without_half_pairs(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)).encode() + b"\n"
        )


def without_half_pairs(document: str) -> str:
    """JSON text that UTF-8 can hold: half a surrogate pair, of a file name that is no UTF-8, as its escape, which reads back."""
    return document if document.isascii() else _HALF_PAIR.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def read_record(
    path: Path, needed: Mapping[str, type], mend: str = "begin anew with `fasttrain train`"
) -> dict[str, Any]:
    """A JSON document of a run with the keys (dotted where they lie deeper) and types that `needed` names.

    Raises StorageError that names the file and what it lacks, and says how to mend it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: it is no JSON document; {mend}") from error
    for key, kind in needed.items():
        value: Any = record
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise StorageError(f"{path} is damaged: it has no proper {key!r}; {mend}")
    return dict(record)


def told_free(folder: Path) -> str:
    """The free bytes of its disk, in brackets; nothing where that cannot be known."""
    with contextlib.suppress(OSError):
        usage = os.statvfs(folder)
        return f" ({usage.f_bavail * usage.f_frsize:,} bytes free)"
    return ""
