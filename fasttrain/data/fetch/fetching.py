"""Owns a fetch from beginning to end: download, checksum, unpacking, and the folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.fetch.address import check_address, local_file, shown
from fasttrain.data.fetch.archive import unpack
from fasttrain.data.fetch.catalogue import KnownSet, known_set, table_entry
from fasttrain.data.fetch.download import Download
from fasttrain.data.fetch.http import Patience
from fasttrain.data.fetch.part import Part
from fasttrain.data.fetch.target import Present, Target, whole_set
from fasttrain.data.fetch.watcher import Watcher, size_text
from fasttrain.errors import DataError, RecipeError

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """The set in its folder. `already_there`: nothing was done, and `address`, `md5` and `archive_bytes` are None."""

    known: KnownSet
    folder: Path
    present: Present
    already_there: bool
    address: str | None = None
    md5: str | None = None
    archive_bytes: int | None = None


def fetch(
    name: str,
    target: Path,
    watcher: Watcher,
    address: str | None = None,
    md5: str | None = None,
    patience: Patience | None = None,
) -> Fetched:
    """Gets the Decathlon set `name` into the folder `target`, so that `target/dataset.json` lists its cases.

    address: where the archive is, else as in MONAI's table. md5: its checksum in hex, else the table's. A set that is there
    already is left as it is. What was downloaded when the process was ended is kept beside `target` and used by the next
    call. Raises RecipeError for an unknown name, address or checksum; DataError for a wrong archive or a folder that holds
    something else; MachineError for the network; StorageError for the disk or while another fetch is at work there.
    """
    known = known_set(name)
    given = address is not None
    if address is not None:
        check_address(address)
    if md5 is not None and not re.fullmatch("[0-9a-fA-F]{32}", md5):
        raise RecipeError(f"--md5 {md5} is no MD5 checksum; 32 hexadecimal digits are expected")
    place = Target(target)
    if (present := place.present(known)) is not None:
        return _already_there(known, place, present, watcher)
    place.check_room_for_rename()
    if address is None or md5 is None:
        watcher.say("looking up MONAI's table of the Decathlon")
        table_address, table_md5 = table_entry(known.task)
        address, md5 = address or table_address, md5 or table_md5
    with place.locked(watcher):
        # Another fetch may have ended since
        if (present := place.present(known)) is not None:
            return _already_there(known, place, present, watcher)
        return _fetch(known, place, address, md5.lower(), patience or Patience(), watcher, given)


def _already_there(known: KnownSet, place: Target, present: Present, watcher: Watcher) -> Fetched:
    titled = f" (its dataset.json calls it {present.title})" if present.title is not None else ""
    watcher.say(f"{place.path} holds the whole set already{titled}: nothing to fetch")
    # Left by a fetch that was killed between its last two deeds
    Part(place.part, "").remove()
    return Fetched(known, place.path, present, True)


def _fetch(
    known: KnownSet, place: Target, address: str, md5: str, patience: Patience, watcher: Watcher, given: bool
) -> Fetched:
    """`given`: the user named the address, so that the archive may be one of their own."""
    place.tidy()
    local = local_file(address)
    part = Part(place.part, md5)
    if local is not None:
        archive = local
        found = md5_of(local, watcher)
        if found != md5:
            raise DataError(_wrong_sum(str(local), local.stat().st_size, found, md5, given))
    else:
        archive = part.path
        # The volumes in the archive are compressed already, so that it is hardly larger than what is in it
        download = Download(
            address, part, known.rough_bytes, patience, lambda size: place.check_space(size, size), watcher
        )
        _download_right(download, md5, given)
    size = archive.stat().st_size
    present = _unpack(known, place, archive, address, md5, watcher)
    part.remove()
    return Fetched(known, place.path, present, False, shown(address), md5, size)


def _download_right(download: Download, md5: str, given: bool) -> None:
    """Downloads until the checksum is right: one pieced together is tried once afresh, for a seam may be wrong."""
    part, watcher, address = download.part, download.watcher, shown(download.address)
    pieced = part.whole
    if part.whole:
        watcher.say(f"{part.path} is all here")
    else:
        watcher.say(f"downloading {address} to {part.path}")
        pieced = download.run()
    while (found := md5_of(part.path, watcher)) != md5:
        fault = _wrong_sum(address, part.size, found, md5, given)
        part.remove()
        if not pieced:
            raise DataError(fault)
        watcher.say(f"the checksum is {found} and not {md5}; downloading all of it once more")
        download.run()
        pieced = False
    watcher.say(f"the checksum is right: MD5 {md5}")


def _wrong_sum(what: str, size: int, found: str, md5: str, given: bool) -> str:
    own = f"; if the archive is yours and whole, add `--md5 {found}`" if given else ""
    return (
        f"{what} ({size_text(size)}) has the MD5 checksum {found}, and {md5} is expected: it is another file or a damaged one; "
        f"try again later, or another mirror with --from{own}"
    )


def _unpack(known: KnownSet, place: Target, archive: Path, address: str, md5: str, watcher: Watcher) -> Present:
    downloaded = archive == place.part
    called = shown(address) if downloaded else str(archive)
    try:
        try:
            check = lambda size: place.check_space(0, size)  # noqa: E731
            count = unpack(archive, called, place.unpacking, check, watcher, known.task)
            present = _unpacked_set(place.unpacking, called)
        except DataError:
            # Its checksum is right, so that it would be no better the next time
            if downloaded:
                Part(place.part, md5).remove()
            raise
        origin = {"set": known.name, "task": known.task, "address": shown(address), "md5": md5, "files": count}
        place.settle(origin)
    finally:
        # After the rename there is nothing of that name; after an error nothing must stay half done
        place.tidy()
    return present


def _unpacked_set(folder: Path, called: str) -> Present:
    try:
        return whole_set(folder, "the archive is not whole; try another mirror with --from")
    except DataError as error:
        # The folder that the sentence names will be gone when it is read
        raise DataError([f"in {called}, {fault.replace(f'{folder}/', '')}" for fault in error.faults]) from error


def md5_of(path: Path, watcher: Watcher) -> str:
    """The MD5 of a file in lower-case hex: MONAI's table has no other, and it guards against damage, not against malice.

    Raises DataError where the file cannot be read.
    """
    digest, done = hashlib.md5(usedforsecurity=False), 0
    try:
        with open(path, "rb") as stream:
            total = max(path.stat().st_size, 1)
            while block := stream.read(_READ_BYTES):
                digest.update(block)
                done += len(block)
                watcher.advance("checking", done, total)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
