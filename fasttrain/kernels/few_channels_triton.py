"""Owns the Triton kernels of a convolution of few channels; imported where Triton is there.

A row is an output voxel, a column is a tap of the kernel with an input channel: of few channels there are so few columns that the
matrix of all (column, row) values of x is gathered tile by tile and never stored. A tile's rows are `LINES` lines of `ACROSS`
neighbouring voxels, so that addresses and borders are sums and conjunctions of one term an axis.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(tile, depth, height, width, LINES: tl.constexpr, ACROSS: tl.constexpr):
    """Image, depth, lines and columns of a tile, by its number; tiles go along the width first."""
    across = tl.cdiv(width, ACROSS)
    down = tl.cdiv(height, LINES)
    w = tile % across * ACROSS + tl.arange(0, ACROSS)
    rest = tile // across
    h = rest % down * LINES + tl.arange(0, LINES)
    rest = rest // down
    return rest // depth, rest % depth, h, w


@triton.jit
def _rows(n, d, h, w, depth, height, width, LINES: tl.constexpr, ACROSS: tl.constexpr):
    """Number of each row of a tile, int64, and whether there is such a voxel."""
    line = (n.to(tl.int64) * depth + d) * height + h
    row = line[:, None] * width + w[None, :]
    there = (h < height)[:, None] & (w < width)[None, :]
    return tl.reshape(row, [LINES * ACROSS]), tl.reshape(there, [LINES * ACROSS])


@triton.jit
def _gathered(
    x, n, d, h, w, column, columns, channels, height, width, x_depth, x_height, x_width, x_image, x_row,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    LINES: tl.constexpr, ACROSS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x at the voxel that each row's tap falls on, [column, row]; 0 outside of x. `height` and the like are the output's sizes,
    `x_height` and the like the input's.
    """
    channel = column % channels
    tap = column // channels
    at_d = d * STRIDE_D - PAD_D + tap // (KERNEL_W * KERNEL_H)
    at_h = (h * STRIDE_H - PAD_H)[None, :] + (tap // KERNEL_W % KERNEL_H)[:, None]
    at_w = (w * STRIDE_W - PAD_W)[None, :] + (tap % KERNEL_W)[:, None]
    in_d = (at_d >= 0) & (at_d < x_depth) & (column < columns)
    in_h = (at_h >= 0) & (at_h < x_height) & (h < height)[None, :] & in_d[:, None]
    in_w = (at_w >= 0) & (at_w < x_width) & (w < width)[None, :]
    line = (at_d[:, None] * x_height + at_h) * (x_width * x_row) + channel[:, None]
    place = line[:, :, None] + (at_w * x_row)[:, None, :]
    value = tl.load(x + n.to(tl.int64) * x_image + place, mask=in_h[:, :, None] & in_w[:, None, :], other=0.0)
    return tl.reshape(value, [BLOCK_K, LINES * ACROSS])


@triton.jit
def forward_few(
    x, weight, bias, y, columns, channels, outputs, depth, height, width, x_depth, x_height, x_width, x_image, x_row, y_row,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [row, output] = gathered x transposed · weight [column, output] (+ bias)."""
    n, d, h, w = _place(tl.program_id(0), depth, height, width, LINES, ACROSS)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([LINES * ACROSS, BLOCK_N], tl.float32)
    for start in range(0, columns, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        left = _gathered(
            x, n, d, h, w, column, columns, channels, height, width, x_depth, x_height, x_width, x_image, x_row,
            KERNEL_H, KERNEL_W, STRIDE_D, STRIDE_H, STRIDE_W, PAD_D, PAD_H, PAD_W, LINES, ACROSS, BLOCK_K,
        )  # fmt: skip
        right = tl.load(
            weight + column[:, None] * outputs + output[None, :],
            mask=(column < columns)[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    row, there = _rows(n, d, h, w, depth, height, width, LINES, ACROSS)
    tl.store(
        y + row[:, None] * y_row + output[None, :], total.to(y.dtype.element_ty),
        mask=there[:, None] & (output < outputs)[None, :],
    )  # fmt: skip


@triton.jit
def weight_gradient_few(
    x, dy, partial, columns, channels, outputs, depth, height, width, x_depth, x_height, x_width, x_image, x_row, dy_row,
    tiles, chunk_tiles,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [chunk, column, output] = gathered x · dy, over a chunk of tiles."""
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(0)
    total = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for tile in range(chunk * chunk_tiles, tl.minimum((chunk + 1) * chunk_tiles, tiles)):
        n, d, h, w = _place(tile, depth, height, width, LINES, ACROSS)
        left = _gathered(
            x, n, d, h, w, column, columns, channels, height, width, x_depth, x_height, x_width, x_image, x_row,
            KERNEL_H, KERNEL_W, STRIDE_D, STRIDE_H, STRIDE_W, PAD_D, PAD_H, PAD_W, LINES, ACROSS, BLOCK_K,
        )  # fmt: skip
        row, there = _rows(n, d, h, w, depth, height, width, LINES, ACROSS)
        right = tl.load(
            dy + row[:, None] * dy_row + output[None, :], mask=there[:, None] & (output < outputs)[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(
        partial + (chunk.to(tl.int64) * columns + column[:, None]) * outputs + output[None, :], total,
        mask=(column < columns)[:, None] & (output < outputs)[None, :],
    )  # fmt: skip
