"""Owns the Triton kernels of intensity augmentation; imported where Triton is there.

Images are changed in place: [sample, channel, voxel] with the distances of each in elements, float32. A program (block and
channel, sample) has `BLOCK` voxels of one channel and ends at once where the sample's row of the table says that there is
nothing to do. `maps` and `settled` hold numbers a channel; a map is as `intensity_columns.IDENTITY` says.

`partial` [sample · channel, 4, block] has the lowest and highest value, the mean and the sum of squares about it, of each block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttrain.kernels import intensity_columns as table_columns

COLUMNS = tl.constexpr(table_columns.COLUMNS)
SEED = tl.constexpr(table_columns.SEED)
STD = tl.constexpr(table_columns.STD)
SIGMA = tl.constexpr(table_columns.SIGMA)
COARSE = tl.constexpr(table_columns.COARSE)
NOISE_BIT = tl.constexpr(table_columns.NOISE)
BLUR_BIT = tl.constexpr(table_columns.BLUR)
LOW_BIT = tl.constexpr(table_columns.LOW_RESOLUTION)

SETTLED = tl.constexpr(table_columns.SETTLED)
CURVE_AT = tl.constexpr(5)
# Whose value or alignment changes no load, so that one compiled kernel serves all (that of `voxels` does: it ends masks)
SAME = [
    *("table", "numbers", "maps", "blocks", "depth", "height", "width", "table_step", "map_sample_step"),
    *(
        "map_channel_step",
        "touched",
        "changes",
        "wants",
        "mapped",
        "curved",
        "axis",
        "step",
        "length",
        "radius",
        "lift",
    ),
]
TAU = tl.constexpr(6.283185307179586)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _mapped(value, at):
    value = (value - tl.load(at)) * tl.load(at + 1) + tl.load(at + 2)
    return tl.minimum(tl.maximum(value, tl.load(at + 3)), tl.load(at + 4))


@triton.jit
def _normal_pair(one, other):
    radius = tl.sqrt(-2.0 * tl.log((one.to(tl.float32) + 0.5) * 2.3283064365386963e-10))
    angle = other.to(tl.float32) * (2.3283064365386963e-10 * TAU)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _noise(row, block, channel, voxels, BLOCK: tl.constexpr):
    """As `noise.normal_field`."""
    seed = (tl.load(row + SEED + 1).to(tl.int64) << 32) | (tl.load(row + SEED).to(tl.int64) & 0xFFFFFFFF)
    counter = channel * ((voxels + 3) // 4) + block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    one, two, three, four = tl.randint4x(seed, counter)
    first, second = _normal_pair(one, two)
    third, fourth = _normal_pair(three, four)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def _keep_moments(value, there, partial, volume, block, blocks, voxels, BLOCK: tl.constexpr):
    count = tl.minimum(voxels - block * BLOCK, BLOCK).to(tl.float32)
    mean = tl.sum(tl.where(there, value, 0.0), 0) / count
    away = tl.where(there, value - mean, 0.0)
    place = partial + volume.to(tl.int64) * 4 * blocks + block
    tl.store(place, tl.min(tl.where(there, value, float("inf")), 0))
    tl.store(place + blocks, tl.max(tl.where(there, value, float("-inf")), 0))
    tl.store(place + 2 * blocks, mean)
    tl.store(place + 3 * blocks, tl.sum(away * away, 0))


@triton.jit(do_not_specialize=SAME)
def points(
    x, table, numbers, maps, settled, partial, voxels, blocks, sample_step, channel_step, voxel_step,
    table_step, map_sample_step, map_channel_step, touched, changes, wants, mapped, curved,
    CHANNELS: tl.constexpr, NOISE: tl.constexpr, CURVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Noise, then a map, then a gamma curve: voxels that have to do with no others.

    Bits of flags: who is `touched` at all, whose voxels change, who `wants` moments, whose are `mapped` and `curved`.
    """
    channel, block = tl.program_id(0) % CHANNELS, tl.program_id(0) // CHANNELS
    sample = tl.program_id(1)
    place = sample * table_step + channel * COLUMNS
    flags = tl.load(table + place)
    if (flags & touched) == 0:
        return
    voxel = block * BLOCK + tl.arange(0, BLOCK)
    there = voxel < voxels
    at = x + sample.to(tl.int64) * sample_step + channel * channel_step + voxel * voxel_step
    value = tl.load(at, mask=there, other=0.0)
    if NOISE:  # noqa: SIM102  (a constant, which is not to be mixed with what is known on the device)
        if (flags & NOISE_BIT) != 0:
            value += _noise(table + place, block, channel, voxels, BLOCK) * tl.load(numbers + place + STD)
    if (flags & mapped) != 0:
        value = _mapped(value, maps + sample * map_sample_step + channel * map_channel_step)
    volume = sample * CHANNELS + channel
    if CURVE:  # noqa: SIM102
        if (flags & curved) != 0:
            curve = settled + volume * SETTLED + CURVE_AT
            low, span, power, sign = tl.load(curve), tl.load(curve + 1), tl.load(curve + 2), tl.load(curve + 3)
            share = (sign * value - low) / tl.maximum(span, TINY)
            share = tl.minimum(tl.maximum(share, 0.0), 1.0)
            value = sign * (tl.exp(power * tl.log(share)) * span + low)
    if (flags & changes) != 0:
        tl.store(at, value, mask=there)
    if (flags & wants) != 0:
        _keep_moments(value, there, partial, volume, block, blocks, voxels, BLOCK)


@triton.jit(do_not_specialize=SAME)
def blur(
    x, y, table, numbers, partial, voxels, blocks, sample_step, channel_step, voxel_step, table_step,
    axis, step, length, radius, lift, touched, wants,
    CHANNELS: tl.constexpr, WRAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes y, x blurred along one axis, of `length` voxels `step` apart, whose outside mirrors its inside.

    With WRAPS the kernel reaches farther than one mirroring; `lift` is a multiple of 2 · length that is no less than `radius`.
    """
    channel, block = tl.program_id(0) % CHANNELS, tl.program_id(0) // CHANNELS
    sample = tl.program_id(1)
    place = sample * table_step + channel * COLUMNS
    flags = tl.load(table + place)
    if (flags & (BLUR_BIT | touched)) == 0:
        return
    voxel = block * BLOCK + tl.arange(0, BLOCK)
    there = voxel < voxels
    base = sample.to(tl.int64) * sample_step + channel * channel_step
    if (flags & BLUR_BIT) != 0:
        value = tl.load(x + base + voxel * voxel_step, mask=there, other=0.0)
        sigma = tl.load(numbers + place + SIGMA + axis)
        position = voxel // step % length
        weights = 1.0
        # Beyond six deviations nothing is left that a float32 could show
        reach = tl.minimum(radius, (sigma * 6.0).to(tl.int32) + 1)
        for tap in range(1, reach + 1):
            share = tap / sigma
            weight = tl.exp(-0.5 * share * share)
            weights += 2.0 * weight
            if WRAPS:
                after = (position + tap) % (2 * length)
                before = (position - tap + lift) % (2 * length)
                before = tl.where(before < length, before, 2 * length - 1 - before)
            else:
                after = position + tap
                before = position - tap
                before = tl.where(before < 0, -1 - before, before)
            after = tl.where(after < length, after, 2 * length - 1 - after)
            right = tl.load(x + base + (voxel + (after - position) * step) * voxel_step, mask=there, other=0.0)
            left = tl.load(x + base + (voxel + (before - position) * step) * voxel_step, mask=there, other=0.0)
            value += weight * (left + right)
        value = value / weights
        tl.store(y + base + voxel * voxel_step, value, mask=there)
    else:
        value = tl.load(y + base + voxel * voxel_step, mask=there, other=0.0)
    if (flags & wants) != 0:
        _keep_moments(value, there, partial, sample * CHANNELS + channel, block, blocks, voxels, BLOCK)


@triton.jit
def _coarse_place(index, length, coarse):
    """The voxel that is nearest to the centre of a coarse one."""
    return (2 * index + 1) * length // (2 * coarse)


@triton.jit(do_not_specialize=SAME)
def downsample(
    x, coarse, table, maps, voxels, depth, height, width, sample_step, channel_step, voxel_step,
    table_step, map_sample_step, map_channel_step, mapped,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """coarse [sample · channel, voxel] of fewer voxels, the nearest ones; mapped."""
    channel, block = tl.program_id(0) % CHANNELS, tl.program_id(0) // CHANNELS
    sample = tl.program_id(1)
    row = table + sample * table_step + channel * COLUMNS
    flags = tl.load(row)
    if (flags & LOW_BIT) == 0:
        return
    planes, lines, line = tl.load(row + COARSE), tl.load(row + COARSE + 1), tl.load(row + COARSE + 2)
    index = block * BLOCK + tl.arange(0, BLOCK)
    there = index < planes * lines * line
    z = _coarse_place(index // (lines * line), depth, planes)
    y = _coarse_place(index // line % lines, height, lines)
    x_place = _coarse_place(index % line, width, line)
    base = sample.to(tl.int64) * sample_step + channel * channel_step
    value = tl.load(x + base + ((z * height + y) * width + x_place) * voxel_step, mask=there, other=0.0)
    if (flags & mapped) != 0:
        value = _mapped(value, maps + sample * map_sample_step + channel * map_channel_step)
    volume = (sample * CHANNELS + channel).to(tl.int64)
    tl.store(coarse + volume * voxels + index, value, mask=there)


@triton.jit
def _between(index, length, coarse):
    """Where torch's linear interpolation, without aligned corners, looks: the lower place, the upper, and the upper's share."""
    at = (index.to(tl.float32) + 0.5) * tl.div_rn(coarse.to(tl.float32), length.to(tl.float32)) - 0.5
    at = tl.maximum(at, 0.0)
    low = tl.minimum(at.to(tl.int32), coarse - 1)
    return low, tl.minimum(low + 1, coarse - 1), at - low.to(tl.float32)


@triton.jit(do_not_specialize=SAME)
def upsample(
    x, coarse, table, maps, partial, voxels, blocks, depth, height, width, sample_step, channel_step, voxel_step,
    table_step, map_sample_step, map_channel_step, touched, wants, mapped,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x of as many voxels as before, linearly from `coarse`; channels whose resolution stays are mapped only."""
    channel, block = tl.program_id(0) % CHANNELS, tl.program_id(0) // CHANNELS
    sample = tl.program_id(1)
    row = table + sample * table_step + channel * COLUMNS
    flags = tl.load(row)
    if (flags & touched) == 0:
        return
    volume = (sample * CHANNELS + channel).to(tl.int64)
    voxel = block * BLOCK + tl.arange(0, BLOCK)
    there = voxel < voxels
    at = x + sample.to(tl.int64) * sample_step + channel * channel_step + voxel * voxel_step
    if (flags & LOW_BIT) != 0:
        planes, lines, line = tl.load(row + COARSE), tl.load(row + COARSE + 1), tl.load(row + COARSE + 2)
        z0, z1, part_z = _between(voxel // (width * height), depth, planes)
        y0, y1, part_y = _between(voxel // width % height, height, lines)
        x0, x1, part_x = _between(voxel % width, width, line)
        base = coarse + volume * voxels
        row00, row01 = base + (z0 * lines + y0) * line, base + (z0 * lines + y1) * line
        row10, row11 = base + (z1 * lines + y0) * line, base + (z1 * lines + y1) * line
        v000, v001 = tl.load(row00 + x0, mask=there, other=0.0), tl.load(row00 + x1, mask=there, other=0.0)
        v010, v011 = tl.load(row01 + x0, mask=there, other=0.0), tl.load(row01 + x1, mask=there, other=0.0)
        v100, v101 = tl.load(row10 + x0, mask=there, other=0.0), tl.load(row10 + x1, mask=there, other=0.0)
        v110, v111 = tl.load(row11 + x0, mask=there, other=0.0), tl.load(row11 + x1, mask=there, other=0.0)
        front = (v000 * (1 - part_x) + v001 * part_x) * (1 - part_y) + (v010 * (1 - part_x) + v011 * part_x) * part_y
        back = (v100 * (1 - part_x) + v101 * part_x) * (1 - part_y) + (v110 * (1 - part_x) + v111 * part_x) * part_y
        value = front * (1 - part_z) + back * part_z
    else:
        value = tl.load(at, mask=there, other=0.0)
        if (flags & mapped) != 0:
            value = _mapped(value, maps + sample * map_sample_step + channel * map_channel_step)
    tl.store(at, value, mask=there)
    if (flags & wants) != 0:
        _keep_moments(value, there, partial, volume, block, blocks, voxels, BLOCK)
