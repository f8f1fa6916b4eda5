"""Owns the sums over an image that losses on sigmoids of overlapping regions are made of, in one pass over logits and labels, and
one for the gradient.

Labels stay one byte a voxel: a table says which regions hold a class, so that no map of a region is ever written to memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.kernels.rows import as_rows, channels_last, kernels_take

MOST_REGIONS = 30
"""Each is a bit of a signed number of 32."""
_ELEMENTS = 2048
_PROGRAMS = 528


def usable(logits: Tensor) -> bool:
    """Whether the kernels take these logits: channels-last memory of a GPU, and not too many regions."""
    return (
        kernels_take(logits)
        and logits.ndim in (4, 5)
        and logits.shape[1] <= MOST_REGIONS
        and (logits.shape[1] == 1 or logits.stride(1) == 1)
        and not torch.compiler.is_compiling()
    )


def region_bits(regions: Sequence[Sequence[int]]) -> Tensor:
    """int32 [256]: bit n of entry i is set where region n holds class index i."""
    table = torch.zeros(256, dtype=torch.int32)
    for number, members in enumerate(regions):
        table[list(members)] |= 1 << number
    return table


def region_sums(
    logits: Tensor, label: Tensor, bits: Tensor, squared: bool, gamma: float, alpha: float | None, ignored: int | None
) -> Tensor:
    """float32 [4, batch, region] of logits [batch, region, *spatial], class indices [batch, 1, *spatial] and `region_bits` on
    the same device: over each image's voxels the sums of p·g, of p (or p² where `squared`), of g, and of the focal loss
    −(1 − q)^gamma · log q, with p the sigmoid, g 1 inside a region and q the probability of being right; weighed by `alpha`
    inside and by 1 − alpha outside. With a gamma of 0 that is binary cross-entropy. Voxels of the label `ignored` count nowhere
    and get no gradient. Differentiable once.
    """
    result: Tensor = _RegionSums.apply(logits, label, bits, squared, gamma, alpha, ignored)
    return result


def plain(
    logits: Tensor, label: Tensor, bits: Tensor, squared: bool, gamma: float, alpha: float | None, ignored: int | None
) -> Tensor:
    """The same in torch's own operations, for any device and type."""
    numbers = torch.arange(logits.shape[1], device=label.device, dtype=torch.int32)
    held = bits[label.long()] >> numbers.view(1, -1, *(1,) * (label.ndim - 2))
    known = torch.ones_like(label, dtype=torch.bool) if ignored is None else label != ignored
    members = ((held & 1) == 1) & known
    values = torch.where(known, logits if logits.dtype is torch.float64 else logits.float(), 0.0)
    p = torch.where(known, torch.sigmoid(values), 0.0)
    towards = torch.where(members, values, -values)
    right = functional.logsigmoid(towards)
    focal = -(gamma * (right - towards)).exp() * right
    if alpha is not None:
        focal = focal * torch.where(members, alpha, 1 - alpha)
    maps = (p * members, p.square() if squared else p, members.to(p.dtype), torch.where(known, focal, 0.0))
    return torch.stack([one.flatten(2).sum(2) for one in maps])


class _RegionSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        label: Tensor,
        bits: Tensor,
        squared: bool,
        gamma: float,
        alpha: float | None,
        ignored: int | None,
    ) -> Tensor:
        from fasttrain.kernels import region_sums_triton as kernels

        seen, label = as_rows(logits), label.contiguous()
        images, regions = logits.shape[:2]
        rows = label.numel() // images
        columns, block = _blocks(regions)
        blocks = math.ceil(rows / block)
        chunk = math.ceil(blocks / max(_PROGRAMS // images, 1)) * block
        chunks = math.ceil(rows / chunk)
        inside, outside = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
        partial = logits.new_empty((chunks, 4, images, regions), dtype=torch.float32)
        kernels.sums_forward[images, chunks](
            seen.tensor, label, bits, partial, rows, regions, seen.group, seen.row, chunk,
            -1 if ignored is None else ignored, gamma, inside, outside,
            SQUARED=squared, BLOCK_R=block, BLOCK_C=columns,
        )  # fmt: skip
        ctx.save_for_backward(seen.tensor, label, bits)
        ctx.squared, ctx.ignored, ctx.focal = squared, ignored, (gamma, inside, outside)
        return partial.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from fasttrain.kernels import region_sums_triton as kernels

        logits, label, bits = ctx.saved_tensors
        seen = as_rows(logits)
        images, regions = logits.shape[:2]
        rows = label.numel() // images
        columns, block = _blocks(regions)
        dlogits = torch.empty_like(logits, memory_format=channels_last(logits))
        out = as_rows(dlogits)
        kernels.sums_backward[math.ceil(rows / block), images](
            seen.tensor, label, bits, gradient.contiguous(), dlogits, rows, regions, images,
            seen.group, seen.row, out.group, out.row, -1 if ctx.ignored is None else ctx.ignored, *ctx.focal,
            SQUARED=ctx.squared, BLOCK_R=block, BLOCK_C=columns,
        )  # fmt: skip
        return dlogits, None, None, None, None, None, None


def _blocks(regions: int) -> tuple[int, int]:
    """Columns and rows of a tile."""
    columns = max(1 << (regions - 1).bit_length(), 2)
    return columns, _ELEMENTS // columns
