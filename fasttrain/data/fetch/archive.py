"""Owns taking a set out of its tar: what the archive holds is judged whole before a byte of it is written."""

from __future__ import annotations

import contextlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fasttrain.data.fetch.watcher import Watcher
from fasttrain.data.sources.found import listed
from fasttrain.errors import DataError, StorageError

_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


@dataclass(frozen=True)
class Contents:
    """The files to be written: path below the set's folder, and the entry of the tar.

    `top`: what that folder is called, "" where the files lie in none.
    """

    files: tuple[tuple[PurePosixPath, tarfile.TarInfo], ...]
    top: str = ""

    @property
    def disk_bytes(self) -> int:
        """What the files take on a disk of 4 KiB blocks."""
        return sum(-(-entry.size // _BLOCK_BYTES) * _BLOCK_BYTES + _BLOCK_BYTES for _, entry in self.files)


def unpack(
    archive: Path,
    called: str,
    folder: Path,
    check_space: Callable[[int], None],
    watcher: Watcher,
    expected_top: str | None = None,
) -> int:
    """Writes the set's files into the new `folder`, its top folder (`Task09_Spleen/`) stripped; how many there were.

    `called` names the archive in sentences: for a download, where it is from. macOS's `._*` are left out. Raises DataError
    for an archive that cannot be read, has no dataset.json at its top, or holds an absolute path, `..`, a link, a device or
    a name twice (nothing is written then); StorageError for the disk; what `check_space`, called with the bytes needed,
    raises. What was written before an error stays in `folder`. Another top folder than `expected_top` is told, not refused.
    """
    with _opened(archive, called) as tar:
        contents = _judged(called, _entries(called, tar))
        if expected_top is not None and contents.top not in ("", expected_top):
            watcher.say(
                f"warning: the top folder of {called} is {contents.top} and not {expected_top}: is it the archive of another set?"
            )
        check_space(contents.disk_bytes)
        with _disk_errors(folder):
            folder.mkdir()
            _write(tar, contents, folder, watcher, called)
    return len(contents.files)


def _opened(archive: Path, called: str) -> tarfile.TarFile:
    with _reading(called):
        return tarfile.open(archive, "r:*")


def _entries(called: str, tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    with _reading(called):
        return tar.getmembers()


@contextlib.contextmanager
def _reading(called: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        # gzip and bz2 tell of damage by an OSError without a number
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "method gz" in cause:
            # What tarfile says of each of its formats in turn
            cause = "it is in no format of such archives; is the address that of the archive itself?"
        raise DataError(f"{called} cannot be read as a tar archive{where}: {cause}") from error


def _judged(called: str, entries: list[tarfile.TarInfo]) -> Contents:
    faults = [fault for entry in entries if (fault := _fault(entry))]
    if faults:
        raise DataError(f"{called} is not safe to unpack, and nothing of it was: it holds {listed(faults)}")
    named = [(PurePosixPath(entry.name), entry) for entry in entries if entry.isreg()]
    files = [(path, entry) for path, entry in named if not path.name.startswith("._") and path.parts[0] != "__MACOSX"]
    tops = sorted({path.parent for path, _ in files if path.name == "dataset.json"}, key=lambda top: len(top.parts))
    if not tops or len(tops[0].parts) > 1:
        found = listed(sorted({path.parts[0] for path, _ in files})) or "no file"
        raise DataError(f"{called} is no set of the Decathlon: it has no dataset.json at its top, but {found}")
    top = tops[0]
    inside = [(path.relative_to(top), entry) for path, entry in files if path.is_relative_to(top)]
    _refuse_clashes(called, [path for path, _ in inside])
    return Contents(tuple(inside), top.name)


def _fault(entry: tarfile.TarInfo) -> str | None:
    """Why an entry must not be written, said with its name."""
    path = PurePosixPath(entry.name)
    if path.is_absolute():
        return f"the absolute path {entry.name!r}"
    if ".." in path.parts:
        return f"the path {entry.name!r}, which leads out of its folder"
    if entry.isreg() and (not path.parts or "\0" in entry.name):
        return f"a file with the name {entry.name!r}"
    if entry.isreg() or entry.isdir():
        return None
    return f"{_KINDS.get(entry.type, 'an entry of an unknown kind')}, {entry.name!r}"


def _refuse_clashes(called: str, paths: list[PurePosixPath]) -> None:
    known: set[PurePosixPath] = set()
    twice = [path for path in paths if path in known or known.add(path)]  # type: ignore[func-returns-value]
    folders = {parent for path in paths for parent in path.parents}
    clashes = [str(path) for path in [*twice, *sorted(known & folders)]]
    if clashes:
        raise DataError(f"{called} is damaged, and nothing of it was unpacked: it holds twice {listed(clashes)}")


def _write(tar: tarfile.TarFile, contents: Contents, folder: Path, watcher: Watcher, called: str) -> None:
    total, done = sum(entry.size for _, entry in contents.files), 0
    for path, entry in contents.files:
        target = folder.joinpath(*path.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(entry)
        assert source is not None, "an entry that is a regular file has contents"
        written = 0
        with source, open(target, "xb") as stream:
            while True:
                with _reading(called, f" at {path}"):
                    block = source.read(_COPY_BYTES)
                if not block:
                    break
                stream.write(block)
                written += len(block)
                watcher.advance("unpacking", done + written, max(total, 1))
            if written != entry.size:
                raise DataError(f"{called} is cut short: {path} has {written} of {entry.size} bytes")
            stream.flush()
            # The archive is removed afterwards: it must not be gone before its files have reached the disk
            os.fsync(stream.fileno())
        done += written
        # A set that is fetched again has the times it had, so that caches of its volumes still fit
        with contextlib.suppress(OSError, OverflowError, ValueError):
            os.utime(target, (entry.mtime, entry.mtime))


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the archive cannot be unpacked to {folder}: {error.strerror or error}; "
            "free space or name another folder with --to, and run it again"
        ) from error
