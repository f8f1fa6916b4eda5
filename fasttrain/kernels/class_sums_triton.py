"""Owns the Triton kernels of the sums that losses on a softmax are made of; imported where Triton is there.

Logits are seen as [image, voxel, class], the classes of a voxel side by side; labels are uint8 [image, voxel]. `ignored` is the
label of voxels that count nowhere, −1 where there is none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softmax(logits, base, row, there, column, classes, row_step):
    """Softmax and its logarithm [row, class], float32; 0 and anything beyond the classes."""
    inside = (column < classes)[None, :]
    value = tl.load(
        logits + base + row.to(tl.int64)[:, None] * row_step + column[None, :], mask=there[:, None] & inside, other=0.0
    ).to(tl.float32)
    value = tl.where(inside, value, -float("inf"))
    value = value - tl.max(value, 1)[:, None]
    powers = tl.exp(value)
    total = tl.sum(powers, 1)
    return powers / total[:, None], value - tl.log(total)[:, None]


@triton.jit
def sums_forward(
    logits, label, partial, rows, classes, image_step, row_step, chunk_rows, ignored,
    SQUARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [chunk, 4, image, class]: of a chunk of voxels the sums of p·g, of p or p², of g and of −g·log p."""
    image, chunk = tl.program_id(0), tl.program_id(1)
    images = tl.num_programs(0)
    column = tl.arange(0, BLOCK_C)
    base = image.to(tl.int64) * image_step
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    overlap = tl.zeros([BLOCK_C], tl.float32)
    predicted = tl.zeros([BLOCK_C], tl.float32)
    reference = tl.zeros([BLOCK_C], tl.float32)
    surprise = tl.zeros([BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = row < last
        given = tl.load(label + image.to(tl.int64) * rows + row, mask=there, other=0).to(tl.int32)
        known = (there & (given != ignored))[:, None]
        p, logarithm = _softmax(logits, base, row, there, column, classes, row_step)
        member = (given[:, None] == column[None, :]) & known
        p = tl.where(known, p, 0.0)
        overlap += tl.sum(tl.where(member, p, 0.0), 0)
        if SQUARED:
            predicted += tl.sum(p * p, 0)
        else:
            predicted += tl.sum(p, 0)
        reference += tl.sum(tl.where(member, 1.0, 0.0), 0)
        surprise += tl.sum(tl.where(member, -logarithm, 0.0), 0)
    place = partial + (chunk * 4 * images + image).to(tl.int64) * classes + column
    step = images * classes
    inside = column < classes
    tl.store(place, overlap, mask=inside)
    tl.store(place + step, predicted, mask=inside)
    tl.store(place + 2 * step, reference, mask=inside)
    tl.store(place + 3 * step, surprise, mask=inside)


@triton.jit
def sums_backward(
    logits, label, gradient, dlogits, rows, classes, images, image_step, row_step, out_image_step, out_row_step, ignored,
    SQUARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Writes dlogits, from `gradient` [4, image, class] of the sums; p is computed again."""
    image = tl.program_id(1)
    column = tl.arange(0, BLOCK_C)
    inside = column < classes
    place = gradient + image.to(tl.int64) * classes + column
    step = images * classes
    of_overlap = tl.load(place, mask=inside, other=0.0)
    of_predicted = tl.load(place + step, mask=inside, other=0.0)
    of_surprise = tl.load(place + 3 * step, mask=inside, other=0.0)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < rows
    given = tl.load(label + image.to(tl.int64) * rows + row, mask=there, other=0).to(tl.int32)
    known = (given != ignored)[:, None]
    p, _ = _softmax(logits, image.to(tl.int64) * image_step, row, there, column, classes, row_step)
    member = given[:, None] == column[None, :]
    if SQUARED:
        outer = 2.0 * p * of_predicted[None, :]
    else:
        outer = of_predicted[None, :] + 0.0 * p
    outer += tl.where(member, of_overlap[None, :], 0.0)
    inner = tl.sum(tl.where(inside[None, :], p * outer, 0.0), 1)
    value = p * (outer - inner[:, None])
    # −log p of the label's class: p − g at each class
    weight = tl.sum(tl.where(member, of_surprise[None, :], 0.0), 1)
    value += weight[:, None] * (p - tl.where(member, 1.0, 0.0))
    value = tl.where(known, value, 0.0)
    target = dlogits + image.to(tl.int64) * out_image_step + row.to(tl.int64)[:, None] * out_row_step + column[None, :]
    tl.store(target, value.to(dlogits.dtype.element_ty), mask=there[:, None] & inside[None, :])
