"""Owns the Triton kernels of the sums that losses on regions are made of; imported where Triton is there.

Logits are seen as [image, voxel, region], the regions of a voxel side by side; labels are uint8 [image, voxel], and bit n of
bits[label] says whether region n holds the voxel. `ignored` is the label of voxels that count nowhere, −1 where there is none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _seen(logits, label, bits, image, rows, row, there, column, regions, image_step, row_step, ignored):
    """Logits, whether each voxel is inside each region, and whether it counts, all [row, region]."""
    wanted = there[:, None] & (column < regions)[None, :]
    place = image.to(tl.int64) * image_step + row.to(tl.int64)[:, None] * row_step + column[None, :]
    value = tl.load(logits + place, mask=wanted, other=0.0).to(tl.float32)
    given = tl.load(label + image.to(tl.int64) * rows + row, mask=there, other=0).to(tl.int32)
    held = tl.load(bits + given)
    counts = wanted & (given != ignored)[:, None]
    member = ((held[:, None] >> column[None, :]) & 1) == 1
    return value, member & counts, counts


@triton.jit
def _right(value, member):
    """The logit towards being right, the logarithm of its sigmoid and that of being wrong."""
    towards = tl.where(member, value, -value)
    right = tl.minimum(towards, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(towards)))
    return right, right - towards


@triton.jit
def sums_forward(
    logits, label, bits, partial, rows, regions, image_step, row_step, chunk_rows, ignored, gamma, alpha_in, alpha_out,
    SQUARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [chunk, 4, image, region]: of a chunk of voxels the sums of p·g, of p or p², of g and of the focal loss."""
    image, chunk = tl.program_id(0), tl.program_id(1)
    images = tl.num_programs(0)
    column = tl.arange(0, BLOCK_C)
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    overlap = tl.zeros([BLOCK_C], tl.float32)
    predicted = tl.zeros([BLOCK_C], tl.float32)
    reference = tl.zeros([BLOCK_C], tl.float32)
    missed = tl.zeros([BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        value, member, counts = _seen(
            logits, label, bits, image, rows, row, row < last, column, regions, image_step, row_step, ignored
        )
        p = tl.where(counts, tl.sigmoid(value), 0.0)
        right, wrong = _right(value, member)
        focal = -tl.exp(gamma * wrong) * right * tl.where(member, alpha_in, alpha_out)
        overlap += tl.sum(tl.where(member, p, 0.0), 0)
        if SQUARED:
            predicted += tl.sum(p * p, 0)
        else:
            predicted += tl.sum(p, 0)
        reference += tl.sum(tl.where(member, 1.0, 0.0), 0)
        missed += tl.sum(tl.where(counts, focal, 0.0), 0)
    place = partial + (chunk * 4 * images + image).to(tl.int64) * regions + column
    step = images * regions
    inside = column < regions
    tl.store(place, overlap, mask=inside)
    tl.store(place + step, predicted, mask=inside)
    tl.store(place + 2 * step, reference, mask=inside)
    tl.store(place + 3 * step, missed, mask=inside)


@triton.jit
def sums_backward(
    logits, label, bits, gradient, dlogits, rows, regions, images, image_step, row_step, out_image_step, out_row_step, ignored,
    gamma, alpha_in, alpha_out, SQUARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Writes dlogits, from `gradient` [4, image, region] of the sums; p is computed again."""
    image = tl.program_id(1)
    column = tl.arange(0, BLOCK_C)
    inside = column < regions
    place = gradient + image.to(tl.int64) * regions + column
    step = images * regions
    of_overlap = tl.load(place, mask=inside, other=0.0)
    of_predicted = tl.load(place + step, mask=inside, other=0.0)
    of_missed = tl.load(place + 3 * step, mask=inside, other=0.0)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < rows
    value, member, counts = _seen(
        logits, label, bits, image, rows, row, there, column, regions, image_step, row_step, ignored
    )
    p = tl.sigmoid(value)
    if SQUARED:
        outer = 2.0 * p * of_predicted[None, :]
    else:
        outer = of_predicted[None, :] + 0.0 * p
    outer += tl.where(member, of_overlap[None, :], 0.0)
    # With w the chance of being wrong, whose slope along the logit towards being right is −w (1 − w)
    right, wrong = _right(value, member)
    chance = tl.exp(wrong)
    focal = tl.exp(gamma * wrong) * (gamma * (1.0 - chance) * right - chance)
    focal *= tl.where(member, alpha_in, -alpha_out)
    result = p * (1.0 - p) * outer + focal * of_missed[None, :]
    target = dlogits + image.to(tl.int64) * out_image_step + row.to(tl.int64)[:, None] * out_row_step + column[None, :]
    result = tl.where(counts, result, 0.0)
    tl.store(target, result.to(dlogits.dtype.element_ty), mask=there[:, None] & inside[None, :])
