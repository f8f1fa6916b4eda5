"""Owns the sums over an image that losses on a softmax are made of, in one pass over logits and labels, and one for the gradient.

In torch's own operations the softmax, its logarithm, the reference as maps and every product of them are written to memory and
read again in float32, which for few classes takes longer than the network's last layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttrain.kernels.rows import as_rows, channels_last, kernels_take

MOST_CLASSES = 32
_ELEMENTS = 2048
_PROGRAMS = 528


def usable(logits: Tensor) -> bool:
    """Whether the kernels take these logits: channels-last memory of a GPU, and not too many classes."""
    return (
        kernels_take(logits)
        and logits.ndim in (4, 5)
        and 1 < logits.shape[1] <= MOST_CLASSES
        and logits.stride(1) == 1
        and not torch.compiler.is_compiling()
    )


def class_sums(logits: Tensor, label: Tensor, squared: bool, ignored: int | None) -> Tensor:
    """float32 [4, batch, class] of logits [batch, class, *spatial] and indices [batch, 1, *spatial]: over each image's voxels
    the sums of p·g, of p (or p² where `squared`), of g, and of −g·log p, with p the softmax and g 1 at the voxels of a
    class. Voxels of the label `ignored` count nowhere and get no gradient. Differentiable once.
    """
    result: Tensor = _ClassSums.apply(logits, label, squared, ignored)
    return result


def plain(logits: Tensor, label: Tensor, squared: bool, ignored: int | None) -> Tensor:
    """The same in torch's own operations, for any device and type."""
    classes = torch.arange(logits.shape[1], device=label.device, dtype=label.dtype)
    members = label == classes.view(1, -1, *(1,) * (label.ndim - 2))
    values = logits if logits.dtype is torch.float64 else logits.float()
    known = torch.ones_like(label, dtype=torch.bool) if ignored is None else label != ignored
    logarithms = torch.log_softmax(torch.where(known, values, 0.0), 1)
    p = torch.where(known, logarithms.exp(), 0.0)
    maps = (p * members, p.square() if squared else p, members.to(p.dtype), -logarithms * members)
    return torch.stack([one.flatten(2).sum(2) for one in maps])


class _ClassSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, squared: bool, ignored: int | None) -> Tensor:
        from fasttrain.kernels import class_sums_triton as kernels

        seen, label = as_rows(logits), label.contiguous()
        images, classes = logits.shape[:2]
        rows = label.numel() // images
        columns, block = _blocks(classes)
        blocks = math.ceil(rows / block)
        chunk = math.ceil(blocks / max(_PROGRAMS // images, 1)) * block
        chunks = math.ceil(rows / chunk)
        partial = logits.new_empty((chunks, 4, images, classes), dtype=torch.float32)
        kernels.sums_forward[images, chunks](
            seen.tensor, label, partial, rows, classes, seen.group, seen.row, chunk,
            -1 if ignored is None else ignored,
            SQUARED=squared, BLOCK_R=block, BLOCK_C=columns,
        )  # fmt: skip
        ctx.save_for_backward(seen.tensor, label)
        ctx.squared, ctx.ignored = squared, ignored
        return partial.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from fasttrain.kernels import class_sums_triton as kernels

        logits, label = ctx.saved_tensors
        seen = as_rows(logits)
        images, classes = logits.shape[:2]
        rows = label.numel() // images
        columns, block = _blocks(classes)
        dlogits = torch.empty_like(logits, memory_format=channels_last(logits))
        out = as_rows(dlogits)
        kernels.sums_backward[math.ceil(rows / block), images](
            seen.tensor, label, gradient.contiguous(), dlogits, rows, classes, images,
            seen.group, seen.row, out.group, out.row, -1 if ctx.ignored is None else ctx.ignored,
            SQUARED=ctx.squared, BLOCK_R=block, BLOCK_C=columns,
        )  # fmt: skip
        return dlogits, None, None, None


def _blocks(classes: int) -> tuple[int, int]:
    """Columns and rows of a tile."""
    columns = max(1 << (classes - 1).bit_length(), 2)
    return columns, _ELEMENTS // columns
