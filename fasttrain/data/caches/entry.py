"""Owns the form in which one preprocessed volume is kept: bytes that are checked whole before they are believed.

A prefix (magic, length, length of the header, CRC-32 of both lengths and of all that follows), a JSON header with the key and
the plain values, then the tensors' raw bytes, each at a multiple of 64. It is no torch.save file, for three reasons: torch's
reader leaves the checksums in its zip unread, so that a flipped bit would be trained on; raw tensors can be mapped, so that a
patch touches its own pages of the file and not the whole volume; and there is nothing in it to unpickle, restricted or not.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import torch

from fasttrain.data.inventory.places import VOLUME_MAGIC

_PREFIX = struct.Struct("<16sQII")
_LENGTHS = struct.Struct("<QI")
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class UnreadableEntryError(Exception):
    """The bytes are no whole entry; the text says in a few words what is wrong with them."""


def pack(record: dict[str, Any], key: str) -> list[bytes | memoryview]:
    """The pieces whose concatenation is the entry of `record` under `key`; the tensors' own memory is not copied.

    A record holds plain tensors, None, bool, int, float, str, and lists and dicts with text keys of these; TypeError for
    anything else, so that no value comes back as another type than it had.
    """
    tensors: list[torch.Tensor] = []
    header = json.dumps({"key": key, "record": _folded(record, tensors)}).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    pieces: list[bytes | memoryview] = [header]
    for tensor in tensors:
        # An empty tensor may have a stride of 0, which torch refuses to view as bytes
        pieces.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
        pieces.append(b"\0" * (-tensor.nbytes % _ALIGNMENT))
    length = _PREFIX.size + sum(len(piece) for piece in pieces)
    checksum = zlib.crc32(_LENGTHS.pack(length, len(header)))
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return [_PREFIX.pack(VOLUME_MAGIC, length, len(header), checksum), *pieces]


def unpack(blob: np.ndarray, key: str) -> dict[str, Any] | None:
    """The record in `blob`, flat uint8 and writable, whose memory the record's tensors share; None where its key is another.

    Raises UnreadableEntryError for bytes that `pack` did not write or that have changed since.
    """
    raw = blob.data
    if len(raw) < _PREFIX.size:
        raise UnreadableEntryError("is empty" if not len(raw) else "is cut off")
    magic, length, header_length, checksum = _PREFIX.unpack_from(raw)
    if magic != VOLUME_MAGIC:
        raise UnreadableEntryError("was not written by fasttrain")
    if length != len(raw):
        raise UnreadableEntryError("is cut off" if length > len(raw) else "has bytes behind its end")
    if zlib.crc32(raw[_PREFIX.size :], zlib.crc32(_LENGTHS.pack(length, header_length))) != checksum:
        raise UnreadableEntryError("does not have the checksum it was written with")
    start = _PREFIX.size + header_length
    try:
        header = json.loads(bytes(raw[_PREFIX.size : start]))
        if header["key"] != key:
            return None
        record = _unfolded(header["record"], blob[start:])
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise UnreadableEntryError("has a header that was not written by fasttrain") from error
    if not isinstance(record, dict):
        raise UnreadableEntryError("has a header that was not written by fasttrain")
    return record


def _folded(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with each tensor replaced by a note of where its bytes lie; dicts are wrapped, so that none looks like a note."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_folded(item, tensors) for item in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {"dict": {name: _folded(item, tensors) for name, item in value.items()}}
    if type(value) is torch.Tensor:
        begin = sum(tensor.nbytes + -tensor.nbytes % _ALIGNMENT for tensor in tensors)
        note = {"tensor": _NAMES[value.dtype], "shape": list(value.shape), "begin": begin}
        tensors.append(value)
        return note
    raise TypeError(f"a record cannot hold {type(value).__name__}")


def _unfolded(value: Any, payload: np.ndarray) -> Any:
    if isinstance(value, list):
        return [_unfolded(item, payload) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: _unfolded(item, payload) for name, item in value["dict"].items()}
    dtype, shape, begin = _DTYPES[value["tensor"]], value["shape"], value["begin"]
    count = 1
    for extent in shape:
        count *= extent
    end = begin + count * dtype.itemsize
    if begin < 0 or end < begin or end > payload.size:
        raise ValueError("a tensor lies outside its entry")
    # Each gets a storage of its own extent: one of the whole entry would go with every tensor that is sent to a process
    return torch.from_numpy(payload[begin:end]).view(dtype).reshape(shape)
