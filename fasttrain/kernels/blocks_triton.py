"""Owns the Triton kernels of a transposed convolution whose kernel is its stride; imported where Triton is there.

Each input voxel (a row) makes a block of output voxels of its own, so all three passes are matrix products in which one side, the
output, is read or written where it lies: column (i, j, k, o) of row (n, d, h, w) is channel o of output voxel (n, d·I + i,
h·J + j, w·K + k). That address is the sum of one of the row and one of the column.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_address(row, rows, depth, height, width, y_image, y_depth, y_height, y_width):
    """Of output voxel (n, d·I, h·J, w·K); `y_depth` and the like are steps of I, J and K voxels."""
    w = row % width
    rest = row // width
    h = rest % height
    rest = rest // height
    d = rest % depth
    n = rest // depth
    return n.to(tl.int64) * y_image + d.to(tl.int64) * y_depth + h.to(tl.int64) * y_height + w.to(tl.int64) * y_width


@triton.jit
def _column_address(column, outputs, kernel_h, kernel_w, step_i, step_j, step_k):
    o = column % outputs
    tap = column // outputs
    k = tap % kernel_w
    tap = tap // kernel_w
    j = tap % kernel_h
    i = tap // kernel_h
    return i.to(tl.int64) * step_i + j.to(tl.int64) * step_j + k.to(tl.int64) * step_k + o


@triton.jit
def forward_blocks(
    x, weight, bias, y, rows, inputs, columns, outputs, depth, height, width, kernel_h, kernel_w,
    x_row, y_image, y_depth, y_height, y_width, step_i, step_j, step_k,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x [row, input] · weight [input, column] (+ bias [output]), scattered."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + inner[None, :],
            mask=(row < rows)[:, None] & (inner < inputs)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + inner[:, None] * columns + column[None, :],
            mask=(inner < inputs)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + column % outputs, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = _row_address(row, rows, depth, height, width, y_image, y_depth, y_height, y_width)[:, None]
    place += _column_address(column, outputs, kernel_h, kernel_w, step_i, step_j, step_k)[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def input_gradient_blocks(
    dy, weight, dx, rows, inputs, columns, outputs, depth, height, width, kernel_h, kernel_w,
    dx_row, y_image, y_depth, y_height, y_width, step_i, step_j, step_k,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dx [row, input] = dy, gathered as [row, column], · weight [input, column] transposed."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_row = _row_address(row, rows, depth, height, width, y_image, y_depth, y_height, y_width)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, columns, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        at_column = _column_address(column, outputs, kernel_h, kernel_w, step_i, step_j, step_k)
        left = tl.load(
            dy + at_row[:, None] + at_column[None, :],
            mask=(row < rows)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + inner[None, :] * columns + column[:, None],
            mask=(inner < inputs)[None, :] & (column < columns)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(
        dx + row.to(tl.int64)[:, None] * dx_row + inner[None, :], total.to(dx.dtype.element_ty),
        mask=(row < rows)[:, None] & (inner < inputs)[None, :],
    )  # fmt: skip


@triton.jit
def weight_gradient_blocks(
    x, dy, partial, rows, inputs, columns, outputs, depth, height, width, kernel_h, kernel_w, chunk_rows,
    x_row, y_image, y_depth, y_height, y_width, step_i, step_j, step_k,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [chunk, input, column]: x transposed · dy over a chunk of rows."""
    inner = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(2)
    at_column = _column_address(column, outputs, kernel_h, kernel_w, step_i, step_j, step_k)
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        left = tl.load(
            x + row.to(tl.int64)[None, :] * x_row + inner[:, None],
            mask=(row < last)[None, :] & (inner < inputs)[:, None], other=0.0,
        )  # fmt: skip
        at_row = _row_address(row, rows, depth, height, width, y_image, y_depth, y_height, y_width)
        right = tl.load(
            dy + at_row[:, None] + at_column[None, :],
            mask=(row < last)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(
        partial + (chunk.to(tl.int64) * inputs + inner[:, None]) * columns + column[None, :], total,
        mask=(inner < inputs)[:, None] & (column < columns)[None, :],
    )  # fmt: skip
