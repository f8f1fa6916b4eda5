"""Owns GPU memory that other processes of the machine read where it lies (CUDA's inter-process memory), by the driver's library.

torch shares tensors too, but keeps files for its counts of them, and cannot share what `expandable_segments` allocates.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES = 64
_NO_MEMORY = 2
_REACH_WHEN_NEEDED = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaPiece:
    """Memory of `device` apart from torch's allocator: `address`, and `handle` by which another process opens it.

    Raises torch.OutOfMemoryError where there is none, and OSError where it cannot be shared.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        _wake(device)
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(count, 1)))
        self.address = int(address.value)
        handle = _Handle()
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except OSError:
            self.free()
            raise
        self.handle = bytes(handle)
        self._count = count
        self._device = device

    @property
    def values(self) -> torch.Tensor:
        """uint8 [count], which must not be used once it is freed."""
        import torch

        return torch.as_tensor(_Bytes(self.address, self._count), device=self._device)

    def free(self) -> None:
        """Gives it back; no process may read it any more."""
        _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Bytes:
    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def open_piece(handle: bytes, device: torch.device) -> int:
    """The address at which kernels of `device` read another process's piece, on whichever card it lies; raises OSError."""
    _wake(device)
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _REACH_WHEN_NEEDED)
    return int(address.value)


def close_piece(address: int) -> None:
    """Gives up an opened piece; no kernel may be reading it."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def reach_each_other(index: int, cards: int) -> bool:
    """Whether the card of this index can read the memory of all of the first so many."""
    import torch

    return all(torch.cuda.can_device_access_peer(index, other) for other in range(cards) if other != index)


def _wake(device: torch.device) -> None:
    """Makes the device's context the one of this thread."""
    import torch

    torch.cuda.set_device(device)
    torch.empty(1, device=device)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    return library


def _call(name: str, *given: Any) -> None:
    code = int(getattr(_library(), name)(*given))
    if code == _NO_MEMORY:
        import torch

        raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left")
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'error').decode()} ({code})")
