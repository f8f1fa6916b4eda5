"""Owns the convolution of tensors with few channels: a network's first layer, and its last where classes are few.

cuDNN pads such tensors to eight channels or more, copies them for that, and leaves the matrix units idle most of the time.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.kernels.rows import as_rows, bias_gradient, compute_dtype, dot_precision, kernels_take, tile_length

_MOST_INPUTS = 4
_MOST_COLUMNS = 128
_MOST_OUTPUTS = 64
_TILE = 128
_PROGRAMS = 528
"""Four for each multiprocessor of an H100."""


def worth(weight: Tensor, groups: int, dilation: tuple[int, ...]) -> bool:
    """Whether a convolution of this weight [output, input, *kernel] has so few columns that gathering them wins."""
    return (
        weight.shape[1] <= _MOST_INPUTS
        and groups == 1
        and set(dilation) == {1}
        and weight[0].numel() <= _MOST_COLUMNS
        and weight.shape[0] <= _MOST_OUTPUTS
    )


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """The convolution of x [batch, input, *spatial] with weight [output, input, *kernel], channels-last."""
    if kernels_take(x):
        result: Tensor = _FewChannels.apply(x, weight, bias, stride, padding)
        return result
    return plain(x, weight, bias, stride, padding)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """The same by torch, for any device."""
    return (functional.conv3d if x.ndim == 5 else functional.conv2d)(x, weight, bias, stride, padding)


class _FewChannels(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> Tensor:
        dtype = compute_dtype(x)
        x = as_rows(x.to(dtype)).tensor
        y = _forward(x, weight.to(dtype), bias, stride, padding)
        ctx.save_for_backward(x, weight, bias)
        ctx.stride, ctx.padding = stride, padding
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        stride, padding = ctx.stride, ctx.padding
        dy = dy.to(x.dtype)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(x, weight, dy, stride, padding)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(x, weight, dy, stride, padding)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = bias_gradient(dy, bias)
        return dx, dweight, dbias, None, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    from fasttrain.kernels import few_channels_triton as kernels

    seen, kernel, outputs = as_rows(x), tuple(weight.shape[2:]), weight.shape[0]
    shape = [
        (length + 2 * pad - size) // step + 1
        for length, pad, size, step in zip(x.shape[2:], padding, kernel, stride, strict=True)
    ]
    y = x.new_empty((x.shape[0], *shape, outputs)).movedim(-1, 1)
    # [output, input, *kernel] → [tap, input, output]
    packed = weight.flatten(2).permute(2, 1, 0).contiguous()
    sizes, constants, tiles = _sizes(x, seen.group, seen.row, y, kernel, stride, padding)
    n, k = tile_length(outputs, 64), tile_length(sizes[0], 64)
    kernels.forward_few[tiles, math.ceil(outputs / n)](
        seen.tensor, packed, bias, y, *sizes, as_rows(y, images=False).row, **constants,
        BIASED=bias is not None, PRECISION=dot_precision(), BLOCK_N=n, BLOCK_K=k,
    )  # fmt: skip
    return y


def _input_gradient(x: Tensor, weight: Tensor, dy: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """A convolution again, of dy with the mirrored kernel, where the stride is 1 and dy has few channels; else torch's."""
    kernel = weight.shape[2:]
    if set(stride) == {1} and weight.shape[0] * math.prod(kernel) <= _MOST_COLUMNS:
        mirrored = weight.transpose(0, 1).flip(tuple(range(2, weight.ndim))).to(dy.dtype)
        around = tuple(size - 1 - pad for size, pad in zip(kernel, padding, strict=True))
        return _forward(as_rows(dy).tensor, mirrored, None, stride, around)
    dx, _, _ = torch.ops.aten.convolution_backward(
        dy, x, weight.to(dy.dtype), None, stride, padding, (1,) * len(stride), False, (0,), 1, (True, False, False)
    )
    return cast(Tensor, dx)


def _weight_gradient(
    x: Tensor, weight: Tensor, dy: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    from fasttrain.kernels import few_channels_triton as kernels

    seen, given = as_rows(x), as_rows(dy, images=False)
    kernel, outputs = tuple(weight.shape[2:]), weight.shape[0]
    sizes, constants, tiles = _sizes(x, seen.group, seen.row, dy, kernel, stride, padding)
    columns = sizes[0]
    n, k = tile_length(outputs, 64), tile_length(columns, 64)
    chunk_tiles = math.ceil(tiles / _PROGRAMS)
    chunks = math.ceil(tiles / chunk_tiles)
    partial = x.new_empty((chunks, columns, outputs), dtype=torch.float32)
    kernels.weight_gradient_few[chunks, math.ceil(columns / k), math.ceil(outputs / n)](
        seen.tensor, given.tensor, partial, *sizes, given.row, tiles, chunk_tiles, **constants,
        PRECISION=dot_precision(), BLOCK_N=n, BLOCK_K=k,
    )  # fmt: skip
    whole = partial.sum(0).view(-1, weight.shape[1], outputs)
    return whole.permute(2, 1, 0).reshape(weight.shape).to(weight.dtype)


def _sizes(
    x: Tensor,
    image: int,
    row: int,
    y: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> tuple[tuple[int, ...], dict[str, int], int]:
    """Sizes as the kernels take them, for planes and volumes alike, and into how many tiles the output falls."""
    lead = 3 - len(kernel)
    outer, inner = (1,) * lead + tuple(y.shape[2:]), (1,) * lead + tuple(x.shape[2:])
    sizes = (math.prod(kernel) * x.shape[1], x.shape[1], y.shape[1], *outer, *inner, image, row)
    # As much of a line as wastes least, and of those the longest
    across = min((64, 32, 16), key=lambda one: (math.ceil(outer[2] / one) * one, -one))
    lines = _TILE // across
    tiles = y.shape[0] * outer[0] * math.ceil(outer[1] / lines) * math.ceil(outer[2] / across)
    constants: dict[str, int] = {"LINES": lines, "ACROSS": across}
    for name, values, fill in (("KERNEL", kernel, 1), ("STRIDE", stride, 1), ("PAD", padding, 0)):
        constants |= {
            f"{name}_{axis}": value for axis, value in zip("DHW", (fill,) * lead + tuple(values), strict=True)
        }
    del constants["KERNEL_D"]
    return sizes, constants, tiles
