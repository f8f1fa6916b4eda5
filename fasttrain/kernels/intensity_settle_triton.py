"""Owns the Triton kernel that makes of a batch's moments what the next pass over its voxels needs; imported where Triton is.

What the arguments are, `intensity_triton` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttrain.kernels import intensity_columns as table_columns
from fasttrain.kernels.intensity_triton import COLUMNS, CURVE_AT, SAME, SETTLED

FACTOR = tl.constexpr(table_columns.FACTOR)
KEPT_AT = tl.constexpr(9)
SAME_HERE = [*SAME, "taken", "restores", "stretches", "clips", "curves", "power_column", "sign"]


@triton.jit(do_not_specialize=SAME_HERE)
def settle(
    table, numbers, maps, settled, partial, voxels, blocks, table_step, map_sample_step, map_channel_step,
    taken, restores, stretches, clips, curves, power_column, sign,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a channel makes of its moments what the next pass needs, in `settled`.

    The map: the one in `maps` where it is `taken`; for whom the bit `restores` says so, the one that gives back the mean and
    deviation from before the curve; after that, by `stretches`, contrast, which `clips` to the former range. Then, by `curves`,
    the ends of the range that the next curve bends.
    """
    volume = tl.program_id(0)
    place = volume // CHANNELS * table_step + volume % CHANNELS * COLUMNS
    flags = tl.load(table + place)
    lows = tl.full([BLOCK_K], float("inf"), tl.float32)
    highs = tl.full([BLOCK_K], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    base = partial + volume.to(tl.int64) * 4 * blocks
    for start in range(0, blocks, BLOCK_K):
        block = start + tl.arange(0, BLOCK_K)
        there = block < blocks
        lows = tl.minimum(lows, tl.load(base + block, mask=there, other=float("inf")))
        highs = tl.maximum(highs, tl.load(base + blocks + block, mask=there, other=float("-inf")))
        count = tl.minimum(voxels - block * BLOCK, BLOCK).to(tl.float32)
        sums += tl.where(there, tl.load(base + 2 * blocks + block, mask=there, other=0.0) * count, 0.0)
    low, high, mean = tl.min(lows, 0), tl.max(highs, 0), tl.sum(sums, 0) / voxels
    for start in range(0, blocks, BLOCK_K):
        block = start + tl.arange(0, BLOCK_K)
        there = block < blocks
        count = tl.minimum(voxels - block * BLOCK, BLOCK).to(tl.float32)
        away = tl.load(base + 2 * blocks + block, mask=there, other=0.0) - mean
        squares += tl.where(there, tl.load(base + 3 * blocks + block, mask=there, other=0.0) + count * away * away, 0.0)
    std = tl.sqrt(tl.sum(squares, 0) / voxels)

    before = maps + volume // CHANNELS * map_sample_step + volume % CHANNELS * map_channel_step
    use = taken != 0
    centre, factor = tl.where(use, tl.load(before), 0.0), tl.where(use, tl.load(before + 1), 1.0)
    offset = tl.where(use, tl.load(before + 2), 0.0)
    bottom = tl.where(use, tl.load(before + 3), float("-inf"))
    top = tl.where(use, tl.load(before + 4), float("inf"))
    out = settled + volume * SETTLED
    use = (flags & restores) != 0
    factor = tl.where(use, tl.load(out + KEPT_AT + 1) / tl.maximum(std, 1e-7), factor)
    centre, offset = tl.where(use, mean, centre), tl.where(use, tl.load(out + KEPT_AT), offset)

    use = (flags & stretches) != 0
    clip = use & (clips != 0)
    middle = (mean - centre) * factor + offset
    bottom = tl.where(clip, (low - centre) * factor + offset, bottom)
    top = tl.where(clip, (high - centre) * factor + offset, top)
    centre, offset = tl.where(use, mean, centre), tl.where(use, middle, offset)
    factor = tl.where(use, factor * tl.load(numbers + place + FACTOR), factor)
    tl.store(out, centre)
    tl.store(out + 1, factor)
    tl.store(out + 2, offset)
    tl.store(out + 3, bottom)
    tl.store(out + 4, top)

    bends = (flags & curves) != 0
    low = tl.minimum(tl.maximum((low - centre) * factor + offset, bottom), top)
    high = tl.minimum(tl.maximum((high - centre) * factor + offset, bottom), top)
    tl.store(out + CURVE_AT, tl.where(sign > 0, low, -high), mask=bends)
    tl.store(out + CURVE_AT + 1, high - low, mask=bends)
    tl.store(out + CURVE_AT + 2, tl.load(numbers + place + power_column), mask=bends)
    tl.store(out + CURVE_AT + 3, sign, mask=bends)
    tl.store(out + KEPT_AT, (mean - centre) * factor + offset, mask=bends)
    tl.store(out + KEPT_AT + 1, std * factor, mask=bends)
