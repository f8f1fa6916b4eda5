"""Owns copies of a state in the host's memory, taken between two steps, so that it can be written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
"""torch's allocator of pinned memory rounds up to a power of two: one piece for all would waste up to half of it."""
_ALIGNED = 64

Layout = tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


@dataclass
class Snapshot:
    """A state as it was at one moment. `state` waits until the copies have arrived; `layout` says what memory it takes."""

    layout: Layout
    memory: list[Tensor]
    _state: dict[str, Any]
    _copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = field(default=None, repr=False)
    is_copy: bool = True

    @classmethod
    def of(cls, state: dict[str, Any]) -> Snapshot:
        """The state itself, which must not change until it is written."""
        return cls((), [], state, is_copy=False)

    @property
    def copy_seconds(self) -> float:
        """How long the GPU was at the copies, which its next step waited for; 0 on a CPU. To be asked after `state`."""
        return 0.0 if self._copied is None else self._copied[0].elapsed_time(self._copied[1]) / 1e3

    def state(self) -> dict[str, Any]:
        """The copies, on the CPU; may be called from another thread, and waits for the GPU there."""
        if self._copied is not None:
            self._copied[1].synchronize()
        return self._state


class Snapshots:
    """Takes snapshots, one after the other, into memory that is used again.

    On a GPU the copies go to pinned memory on a stream of their own, behind the steps that were launched: the host waits for
    none of them, and the next step for the copies alone. On a CPU they are copies.
    """

    def __init__(self) -> None:
        self._spare: Snapshot | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, state: dict[str, Any]) -> Snapshot:
        """A copy of `state`, plain values too. Raises MemoryError or torch's errors where there is no memory for it."""
        by_place: dict[Any, Tensor] = {}
        _map(state, lambda tensor: by_place.setdefault(_place(tensor), tensor))
        tensors = list(by_place.values())
        layout: Layout = tuple((one.dtype, tuple(one.shape), _dense_stride(one)) for one in tensors)
        on_gpu = next((one.device for one in tensors if one.device.type == "cuda"), None)
        spare, self._spare = self._spare, None
        memory = spare.memory if spare is not None and spare.layout == layout else _memory(layout, on_gpu is not None)
        own = dict(zip(by_place, memory, strict=True))
        copies = _map(state, lambda tensor: own[_place(tensor)])
        return Snapshot(layout, memory, copies, self._copy(tensors, memory, on_gpu))

    def give_back(self, snapshot: Snapshot) -> None:
        """The memory of a snapshot that is no longer needed."""
        self._spare = snapshot

    def _copy(
        self, tensors: list[Tensor], memory: list[Tensor], device: torch.device | None
    ) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if device is None:
            for tensor, copy in zip(tensors, memory, strict=True):
                copy.copy_(tensor.detach())
            return None
        current = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(current)
        began, copied = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record(self._stream)
            for tensor, copy in zip(tensors, memory, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)
            copied.record(self._stream)
        # What is launched from here on changes what is being copied
        current.wait_event(copied)
        return began, copied


def _map(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """`value` with new containers, and each tensor as what `of_tensor` makes of it."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, dict):
        return type(value)((key, _map(item, of_tensor)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_map(item, of_tensor) for item in value)
    return value


def _place(tensor: Tensor) -> Any:
    """The same for two names of one weight, which DynUNet's state has: it is copied and filed once."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy: the tensor's own where it leaves out nothing of its memory, so that its layout is kept."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _memory(layout: Layout, pinned: bool) -> list[Tensor]:
    """A tensor for each of `layout`, packed into few pieces; each shows exactly its own bytes, as a checkpoint file wants it."""
    pieces: list[list[tuple[int, int, int]]] = [[]]
    filled = 0
    for index, (dtype, shape, _) in enumerate(layout):
        count = torch.Size(shape).numel() * dtype.itemsize
        if pieces[-1] and filled + count > _CHUNK_BYTES:
            pieces.append([])
            filled = 0
        pieces[-1].append((index, filled, count))
        filled += -(-count // _ALIGNED) * _ALIGNED
    found: dict[int, Tensor] = {}
    for piece in pieces:
        size = max((start + count for _, start, count in piece), default=0)
        held = _bytes(size, pinned).numpy()
        for index, start, count in piece:
            dtype, shape, stride = layout[index]
            if count == 0:
                found[index] = torch.empty_strided(shape, stride, dtype=dtype)
                continue
            flat = torch.frombuffer(held, dtype=dtype, count=count // dtype.itemsize, offset=start)
            found[index] = flat.as_strided(shape, stride)
    return [found[index] for index in range(len(layout))]


def _bytes(size: int, pinned: bool) -> Tensor:
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            # Pageable memory does as well: the copies then make the host wait
            pass
    return torch.empty(size, dtype=torch.uint8)
