"""Owns a transposed convolution whose kernel is its stride as a matrix product that writes each block of output where it lies.

cuDNN computes it as the gradient of a strided convolution, and a plain matrix product needs its result copied into place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttrain.kernels.rows import as_rows, bias_gradient, compute_dtype, dot_precision, kernels_take, tile_length

_PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


def upsample_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[batch, output, *spatial · kernel], channels-last, of x [batch, input, *spatial] and a transposed convolution's
    weight [input, output, *kernel].
    """
    if kernels_take(x):
        result: Tensor = _Blocks.apply(x, weight, bias)
        return result
    return plain(x, weight, bias)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as one of torch's matrix products and a copy, for any device."""
    blocks = torch.matmul(x.movedim(1, -1), weight.movedim(1, -1).flatten(1))
    y = interleaved(blocks.unflatten(-1, (*weight.shape[2:], weight.shape[1])))
    return y if bias is None else y + bias.view(1, -1, *(1,) * (x.ndim - 2))


def interleaved(blocks: Tensor) -> Tensor:
    """[batch, output, *spatial · kernel] of blocks [batch, *spatial, *kernel, output], channels-last."""
    axes = blocks.ndim // 2 - 1
    # [batch, d, h, w, i, j, k, output] → [batch, d, i, h, j, w, k, output]
    order = [0, *(place for axis in range(axes) for place in (1 + axis, 1 + axes + axis)), 1 + 2 * axes]
    shape = [blocks.shape[1 + axis] * blocks.shape[1 + axes + axis] for axis in range(axes)]
    return blocks.permute(order).reshape(blocks.shape[0], *shape, blocks.shape[-1]).movedim(-1, 1)


class _Places:
    """Sizes, and the addresses of the output's voxels, for planes and volumes alike."""

    def __init__(self, x: Tensor, kernel: tuple[int, ...], outputs: int, y: Tensor) -> None:
        spatial, steps = [*x.shape[2:]], [*y.stride()[2:]]
        self.kernel = (1,) * (3 - len(kernel)) + tuple(kernel)
        while len(spatial) < 3:
            spatial.insert(0, 1)
            steps.insert(0, 0)
        self.spatial = tuple(spatial)
        self.rows = x.shape[0] * math.prod(spatial)
        self.inputs, self.outputs = x.shape[1], outputs
        self.columns = math.prod(self.kernel) * outputs
        self.sizes = (
            self.rows, self.inputs, self.columns, outputs, *self.spatial, self.kernel[1], self.kernel[2],
        )  # fmt: skip
        wide = [step * times for step, times in zip(steps, self.kernel, strict=True)]
        self.steps = (y.stride(0), *wide, *steps)


class _Blocks(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from fasttrain.kernels import blocks_triton as kernels

        dtype = compute_dtype(x)
        seen = as_rows(x.to(dtype), images=False)
        packed = weight.to(dtype).movedim(1, -1).flatten(1).contiguous()
        shape = [length * times for length, times in zip(x.shape[2:], weight.shape[2:], strict=True)]
        y = seen.tensor.new_empty((x.shape[0], *shape, weight.shape[1])).movedim(-1, 1)
        places = _Places(x, tuple(weight.shape[2:]), weight.shape[1], y)
        m, n, k = 128, tile_length(places.columns, 128), tile_length(places.inputs, 64)
        kernels.forward_blocks[math.ceil(places.columns / n), math.ceil(places.rows / m)](
            seen.tensor, packed, bias, y, *places.sizes, seen.row, *places.steps,
            BIASED=bias is not None, PRECISION=dot_precision(), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
        )  # fmt: skip
        ctx.save_for_backward(seen.tensor, packed, weight, bias)
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fasttrain.kernels import blocks_triton as kernels

        x, packed, weight, bias = ctx.saved_tensors
        given, seen = as_rows(dy.to(x.dtype), images=False), as_rows(x, images=False)
        places = _Places(x, tuple(weight.shape[2:]), weight.shape[1], given.tensor)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            m, n, k = 128, tile_length(places.inputs, 128), tile_length(places.columns, 64)
            kernels.input_gradient_blocks[math.ceil(places.inputs / n), math.ceil(places.rows / m)](
                given.tensor, packed, dx, *places.sizes, as_rows(dx, images=False).row, *places.steps,
                PRECISION=dot_precision(), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(kernels, seen.tensor, seen.row, given.tensor, places)
            dweight = dweight.unflatten(1, (*weight.shape[2:], weight.shape[1])).movedim(-1, 1).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = bias_gradient(dy, bias)
        return dx, dweight, dbias


def _weight_gradient(kernels: Any, x: Tensor, x_row: int, dy: Tensor, places: _Places) -> Tensor:
    """[input, column] float32."""
    m, n, k = tile_length(places.inputs, 64), tile_length(places.columns, 128), 64
    tiles = math.ceil(places.inputs / m) * math.ceil(places.columns / n)
    chunks = max(min(math.ceil(_PROGRAMS / tiles), math.ceil(places.rows / k)), 1)
    chunk_rows = math.ceil(places.rows / chunks / k) * k
    chunks = math.ceil(places.rows / chunk_rows)
    partial = x.new_empty((chunks, places.inputs, places.columns), dtype=torch.float32)
    kernels.weight_gradient_blocks[math.ceil(places.columns / n), math.ceil(places.inputs / m), chunks](
        x, dy, partial, *places.sizes, chunk_rows, x_row, *places.steps,
        PRECISION=dot_precision(), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
    )  # fmt: skip
    return partial.sum(0) if chunks > 1 else partial[0]
