"""Owns the form in which a process hands a record over to another of the same machine: memory without a name, which both map."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ALIGNED = 64
_TENSOR = "tensor"


@dataclass(frozen=True)
class Offer:
    """Where another process finds memory without a name, and by which inode and size it knows that it is that memory."""

    pid: int
    descriptor: int
    inode: int
    size: int

    @classmethod
    def of(cls, memory: int) -> Offer:
        """Of this process's descriptor, which is to stay open until it was taken."""
        seen = os.fstat(memory)
        return cls(os.getpid(), memory, seen.st_ino, seen.st_size)

    def taken(self) -> dict[str, Any]:
        """The record, its tensors in that very memory; raises OSError where the process cannot be reached."""
        return mapped(self._opened())

    def values(self) -> torch.Tensor:
        """All its bytes, uint8, in that very memory; raises OSError as `taken`."""
        return mapped_bytes(self._opened())

    def _opened(self) -> int:
        memory = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        seen = os.fstat(memory)
        if (seen.st_ino, seen.st_size) != (self.inode, self.size):
            os.close(memory)
            # Processes in other containers have other numbers
            raise ProcessLookupError(f"process {self.pid} is another one here")
        return memory


def written(record: dict[str, Any]) -> int:
    """The descriptor of memory that holds the record: its length and its text in JSON, then its tensors, each where that says."""
    tensors: list[np.ndarray] = []
    text = json.dumps({key: _plain(value, tensors) for key, value in record.items()}).encode()
    begin, end = _after(text), _end_of(tensors)
    memory = os.memfd_create("fasttrain")
    try:
        os.ftruncate(memory, begin + end)
        _write(memory, 0, len(text).to_bytes(8, "little") + text)
        place = begin
        for values in tensors:
            _write(memory, place, values.reshape(-1).view(np.uint8).data)
            place += _end_of([values])
    except BaseException:
        os.close(memory)
        raise
    return memory


def mapped(memory: int) -> dict[str, Any]:
    """The record that lies there, its tensors in that very memory, which is given back with the last of them; the descriptor is
    closed.
    """
    whole = mapped_bytes(memory)
    length = int.from_bytes(whole[:8].numpy().tobytes(), "little")
    text = whole[8 : 8 + length].numpy().tobytes()
    values = whole[_after(text) :]
    return {key: _real(value, values) for key, value in json.loads(text).items()}


def mapped_bytes(memory: int) -> torch.Tensor:
    """All of it, uint8; the descriptor is closed."""
    try:
        # Python's mmap would keep a descriptor for each
        size = os.fstat(memory).st_size
        return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(memory)


def _plain(value: Any, tensors: list[np.ndarray]) -> Any:
    """What JSON can say of it; its tensors go behind `tensors`."""
    if isinstance(value, torch.Tensor):
        first = _end_of(tensors)
        tensors.append(value.contiguous().numpy())
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), first]}
    if isinstance(value, list):
        return [_plain(one, tensors) for one in value]
    return value


def _end_of(tensors: list[np.ndarray]) -> int:
    return sum(-(-one.nbytes // _ALIGNED) * _ALIGNED for one in tensors)


def _real(value: Any, values: torch.Tensor) -> Any:
    # No function within `mapped`: one that calls itself is a cycle, which would hold the memory until it is collected
    if isinstance(value, dict):
        name, shape, first = value[_TENSOR]
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape) * dtype.itemsize
        return values[first : first + count].view(dtype).reshape(shape)
    if isinstance(value, list):
        return [_real(one, values) for one in value]
    return value


def _after(text: bytes) -> int:
    return -(-(8 + len(text)) // _ALIGNED) * _ALIGNED


def _write(memory: int, place: int, values: Any) -> None:
    left = memoryview(values)
    while left:
        count = os.pwrite(memory, left, place)
        place, left = place + count, left[count:]
