"""Owns the folder that a set is fetched to: whether the set is there already, and the names of what lies beside meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.data.fetch.catalogue import KnownSet
from fasttrain.data.fetch.watcher import Watcher, size_text
from fasttrain.data.sources.dataset_json import read_dataset_json
from fasttrain.data.sources.found import listed
from fasttrain.errors import DataError, StorageError
from fasttrain.wording import counted

_ORIGIN = ".fasttrain-fetched.json"


@dataclass(frozen=True)
class Present:
    """A whole set: how many cases have a label, how many do not, and the name that its dataset.json gives it."""

    cases: int
    unlabelled: int
    title: str | None


class Target:
    """The folder `path`; what is made on the way lies beside it, on the same file system, under names that begin with its own.

    Raises StorageError where nothing can be renamed to `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            # Where the name is a link, the folder that it means is what is made
            self._real = self.path.resolve()
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{self.path} is a link that leads nowhere; name another folder with --to") from error
        beside, name = self._real.parent, self._real.name
        self.part = beside / f"{name}.tar.part"
        self.unpacking = beside / f".{name}.unpacking"
        self._lock = beside / f".{name}.fetch.lock"

    def present(self, known: KnownSet) -> Present | None:
        """The set that is there, None where the folder is missing or empty.

        Raises DataError where something else or an incomplete set is in the way: nothing of the user's is overwritten.
        """
        if not os.path.lexists(self._real):
            return None
        try:
            entries = sorted(path.name for path in self._real.iterdir())
        except NotADirectoryError:
            raise DataError(f"{self.path} is a file; a folder is expected, name another with --to") from None
        except OSError as error:
            raise DataError(f"{self.path} cannot be listed: {error.strerror or error}") from error
        if not entries:
            return None
        if "dataset.json" not in entries:
            raise DataError(
                f"{self.path} holds {listed(entries)} and no dataset.json: it is not a set of the Decathlon; "
                "name a new folder with --to"
            )
        origin = _origin_of(self._real / _ORIGIN)
        if origin not in (None, known.name):
            raise DataError(f"{self.path} holds the set {origin} and not {known.name}; name another folder with --to")
        return whole_set(self._real, f"move {self.path} away to fetch it anew, or name another folder with --to")

    def check_room_for_rename(self) -> None:
        """StorageError for a folder that is there, empty, and cannot be replaced by the unpacked one."""
        mounted = os.path.ismount(self._real)
        if mounted or (os.path.exists(self._real) and os.path.samefile(self._real, os.curdir)):
            what = "a mounted disk" if mounted else "the current folder"
            raise StorageError(f"{self.path} is {what} itself, which cannot be replaced; name a folder in it with --to")

    def check_space(self, archive_bytes: int, content_bytes: int) -> None:
        """StorageError where the disk has no room for the rest of the archive and its contents together."""
        here = self.part.stat().st_size if self.part.exists() else 0
        needed = max(archive_bytes - here, 0) + content_bytes
        try:
            free = shutil.disk_usage(self._real.parent).free
        except OSError as error:
            raise StorageError(f"{self._real.parent} cannot be looked at: {error.strerror or error}") from error
        if free < needed:
            raise StorageError(
                f"{self._real.parent} has {size_text(free)} free, and {size_text(needed)} are needed for the archive and what "
                "is in it; free space, or name a folder on another disk with --to"
            )

    @contextlib.contextmanager
    def locked(self, watcher: Watcher) -> Iterator[None]:
        """Keeps other fetches to this folder out; the lock ends with the process, however that ends. Raises StorageError."""
        try:
            self._real.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._claim(watcher)
        except BlockingIOError as error:
            raise StorageError(
                f"another `fasttrain data fetch` is at work on {self.path}; wait until it has ended"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{self._real.parent} cannot be written: {error.strerror or error}; name another folder with --to"
            ) from error
        try:
            yield
        finally:
            # Removed while it is still held, so that nobody else's is
            with contextlib.suppress(OSError):
                self._lock.unlink()
            os.close(descriptor)

    def _claim(self, watcher: Watcher) -> int:
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise
            except OSError as error:
                watcher.say(
                    f"this disk keeps no locks ({error.strerror}); start no second fetch to {self.path} meanwhile"
                )
                return descriptor
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._lock)):
                    return descriptor
            # Whoever held it has removed the file between open and lock
            os.close(descriptor)

    def settle(self, origin: dict[str, Any]) -> None:
        """Notes where the unpacked set is from and gives it its name, all at once. Raises StorageError."""
        try:
            (self.unpacking / _ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            for folder, _, _ in os.walk(self.unpacking):
                _synchronise(folder)
            os.rename(self.unpacking, self._real)
            _synchronise(self._real.parent)
        except OSError as error:
            raise StorageError(
                f"what was unpacked cannot be named {self.path}: {error.strerror or error}; name another folder with --to"
            ) from error

    def tidy(self) -> None:
        """Removes what a killed fetch left unpacked half-way."""
        shutil.rmtree(self.unpacking, ignore_errors=True)


def whole_set(folder: Path, remedy: str) -> Present:
    """What the folder's dataset.json says of it; DataError with `remedy` where files that it lists are missing or empty."""
    path = folder / "dataset.json"
    document = read_dataset_json(path)
    training, test = document.get("training"), document.get("test", [])
    if not isinstance(training, list) or not training:
        raise DataError(f"{path} lists no case under 'training'; {remedy}")
    faults: list[str] = []
    for number, entry in enumerate(training):
        named = _files_of(entry)
        if not named:
            faults.append(f"training[{number}]")
        faults += [name for name in named if not _has_bytes(folder / name)]
    if faults:
        are = "are" if len(faults) > 1 else "is"
        raise DataError(
            f"{path} lists {counted(len(faults), 'file')} that {are} missing or empty: {listed(faults)}; {remedy}"
        )
    title = document.get("name")
    return Present(len(training), len(test) if isinstance(test, list) else 0, title if isinstance(title, str) else None)


def _files_of(entry: Any) -> list[str]:
    """Image and label of an entry, [] where it is malformed."""
    if not isinstance(entry, dict):
        return []
    image = entry.get("image")
    files = [*(image if isinstance(image, list) else [image]), entry.get("label")]
    return [one for one in files if isinstance(one, str)] if all(isinstance(one, str) and one for one in files) else []


def _has_bytes(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except (OSError, ValueError):
        return False


def _origin_of(path: Path) -> str | None:
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["set"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _synchronise(folder: str | Path) -> None:
    # Not every file system lets a folder be synchronised
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
