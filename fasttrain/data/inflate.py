"""Owns the inflation of whole gzip files with their checksum, without taking memory that a damaged file asks for."""

from __future__ import annotations

import contextlib
import importlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasttrain.errors import DataError
from fasttrain.wording import counted

isal_zlib: Any = None
with contextlib.suppress(ImportError):
    # Inflates about twice as fast as zlib; there are machines for which it is not built
    isal_zlib = importlib.import_module("isal.isal_zlib")

GZIP = b"\x1f\x8b"
"""What a gzip file begins with."""
_HIGHEST_RATIO = 1032
"""Deflate cannot pack more bytes than this into one, so a length claimed beyond it is damage, not a size to allocate."""
_SPARE_BYTES = 1 << 20
"""Beyond its voxels a file holds hardly more than this; a length claimed above it is not taken at its word."""
_PIECE_BYTES = 1 << 14
_NO_ZERO = re.compile(rb"[^\0]")


def inflate(path: Path, blob: bytes, wanted: int) -> tuple[bytes | bytearray, int]:
    """At least the first `wanted` bytes (fewer where there are no more), and the length of the whole, whose checksum holds."""
    claimed = int.from_bytes(blob[-4:], "little")
    try:
        # One call for the usual single-member file, since growing a buffer piecemeal costs as much as inflating
        if wanted <= claimed <= min(wanted + _SPARE_BYTES, _HIGHEST_RATIO * len(blob)) and wanted:
            plain = _inflate_at_once(blob, claimed)
            if plain is not None:
                return plain, claimed
        return _inflate_members(blob, wanted)
    except (zlib.error, EOFError) as error:
        raise DataError(damaged(path, error)) from error
    except MemoryError as error:
        raise DataError(f"{path} unpacks to {wanted / 2**30:.3g} GiB, which is more memory than there is") from error


def first_bytes(path: Path, blob: bytes, wanted: int) -> bytes:
    """The first `wanted` bytes, or fewer where `blob`, which may be the beginning of a file, holds no more.

    Raises DataError where what had to be looked at is damaged.
    """
    kept = bytearray()
    try:
        with contextlib.suppress(EOFError):
            for piece in _pieces(blob, wanted):
                kept += piece
                if len(kept) >= wanted:
                    break
    except zlib.error as error:
        raise DataError(damaged(path, error)) from error
    return bytes(kept[:wanted])


def _inflate_at_once(blob: bytes, length: int) -> bytes | None:
    """The one member that a file usually is; None where there is more or less, or where something is wrong, which zlib tells."""
    if isal_zlib is None:
        return None
    member = isal_zlib.decompressobj(31)
    try:
        plain: bytes = member.decompress(blob, length)
        # The checksum may still be ahead where the buffer is full
        beyond = b"" if member.eof else member.decompress(member.unconsumed_tail, 1)
    except isal_zlib.IsalError:
        return None
    whole = member.eof and len(plain) == length and not beyond and not member.unused_data
    return plain if whole else None


def _inflate_members(blob: bytes, wanted: int) -> tuple[bytearray, int]:
    """Files written in several gzip members (bgzip), with zeros after the end, or longer than their voxels need.

    What lies beyond `wanted` bytes is checked and not kept.
    """
    kept, length = bytearray(), 0
    for piece in _pieces(blob):
        if length < wanted:
            kept += piece[: wanted - length]
        length += len(piece)
    return kept, length


def _pieces(blob: bytes, most: int = 0) -> Iterator[bytes]:
    """What all members hold, by turns and where it is given at most so many bytes at a time; at the end all checksums held.

    Raises EOFError where the last member is cut short or followed by something else than zeros, zlib.error where one is damaged.
    """
    view, at = memoryview(blob), 0
    while blob[at : at + 2] == GZIP:
        member = zlib.decompressobj(31)
        while not member.eof:
            if at >= len(blob):
                raise EOFError("the compressed data end too early")
            window = view[at : at + _PIECE_BYTES]
            piece = member.decompress(window, most)
            at += len(window) - len(member.unconsumed_tail)
            yield piece
        at -= len(member.unused_data)
        follows = _NO_ZERO.search(blob, at)
        at = follows.start() if follows else len(blob)
    if at < len(blob):
        much = counted(len(blob) - at, "byte")
        raise EOFError(f"{much} {'follows' if len(blob) - at == 1 else 'follow'} the end of the compressed data")


def damaged(path: Path, error: Exception) -> str:
    """The sentence on a file that zlib will not inflate."""
    return f"{path} is damaged: gzip says {_gzip_fault(error)}; get the file anew"


def _gzip_fault(error: Exception) -> str:
    text = str(error)
    return "the compressed data end too early" if "incomplete or truncated" in text else text.split(": ")[-1]
