"""Owns how kernels see a tensor in channels-last memory: as [group, row, channel], with the distances of groups and rows."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on the CPU, for tests."""


@dataclass(frozen=True, eq=False)
class Rows:
    """`tensor` as [group, row, channel]: how far apart its groups and its rows are, in elements."""

    tensor: Tensor
    group: int
    row: int


def as_rows(x: Tensor, images: bool = True) -> Rows:
    """x [batch, channel, *spatial] itself where its channels lie side by side and its voxels at even distances, else a
    channels-last copy. With `images` each image is a group of rows, without them the whole batch is one.
    """
    sizes = [*x.shape[2:]] if images else [x.shape[0], *x.shape[2:]]
    strides = [*x.stride()[2:]] if images else [x.stride(0), *x.stride()[2:]]
    axes = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    even = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))
    row = axes[-1][1] if axes else x.shape[1]
    if not even or row < x.shape[1] or (x.shape[1] > 1 and x.stride(1) != 1):
        packed = torch.empty_like(x, memory_format=channels_last(x))
        return as_rows(packed.copy_(x), images)
    return Rows(x, x.stride(0) if images else 0, row)


def channels_last(x: Tensor) -> torch.memory_format:
    """The layout, for x's number of axes, in which the channels of a voxel lie side by side."""
    return torch.channels_last_3d if x.ndim == 5 else torch.channels_last


def tile_length(length: int, most: int) -> int:
    """How much of an axis one tile of a matrix product holds: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, min(most, 1 << (length - 1).bit_length()))


def dot_precision() -> str:
    """Triton's name for how float32 operands are multiplied, as torch's convolutions are told."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that torch's own convolutions would compute in: autocast's where it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def bias_gradient(dy: Tensor, bias: Tensor) -> Tensor:
    """[channel] of dy [batch, channel, *spatial], summed in float32."""
    return dy.sum(dim=[0, *range(2, dy.ndim)], dtype=torch.float32).to(bias.dtype)


def kernels_take(x: Tensor) -> bool:
    """Whether Triton's kernels can run on this tensor: on a GPU, with Triton installed, in a type that they know."""
    return x.dtype in DTYPES and (INTERPRETED or (x.is_cuda and _triton_there()))


def _triton_there() -> bool:
    global _found
    if _found is None:
        try:
            import triton  # noqa: F401
        except ImportError:
            _found = False
        else:
            _found = torch.cuda.get_device_capability() >= (7, 0)
    return _found


_found: bool | None = None
