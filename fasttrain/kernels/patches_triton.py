"""Owns the Triton kernel that cuts patches out of resident volumes and moves their voxels; imported where Triton is there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clamped(value, length):
    return tl.minimum(tl.maximum(value, 0.0), length - 1.0)


@triton.jit
def cut_patches(
    images, labels, image_places, label_places, lengths, cases, corners, matrices, displacement, out, out_label,
    case_step, corner_step, matrix_step, depth, height, width,
    CHANNELS: tl.constexpr, BENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block, sample) writes `BLOCK` voxels of a patch: out [sample, voxel, channel], out_label [sample, voxel].

    Volume c, channels last, begins image_places[c] values from `images` on and label_places[c] from `labels` on, be it in other
    memory; lengths [c, 3].
    cases [sample]; corners [sample, 3]; matrices [sample, 3, 3]: output → input offsets from the patch's centre, in voxels;
    displacement [sample, 3, voxel] where BENT.
    """
    sample = tl.program_id(1)
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = depth * height * width
    there = voxel < total
    x = voxel % width
    y = voxel // width % height
    z = voxel // (width * height)
    case = tl.load(cases + sample * case_step)
    corner = corners + sample * corner_step
    first_z, first_y, first_x = tl.load(corner), tl.load(corner + 1), tl.load(corner + 2)
    lines, columns = tl.load(lengths + case * 3 + 1), tl.load(lengths + case * 3 + 2)
    half_z, half_y, half_x = (depth - 1) * 0.5, (height - 1) * 0.5, (width - 1) * 0.5
    away_z, away_y, away_x = z.to(tl.float32) - half_z, y.to(tl.float32) - half_y, x.to(tl.float32) - half_x
    if BENT:
        field = displacement + sample.to(tl.int64) * 3 * total + voxel
        away_z += tl.load(field, mask=there, other=0.0)
        away_y += tl.load(field + total, mask=there, other=0.0)
        away_x += tl.load(field + 2 * total, mask=there, other=0.0)
    matrix = matrices + sample * matrix_step
    at_z = tl.load(matrix) * away_z + tl.load(matrix + 1) * away_y + tl.load(matrix + 2) * away_x + half_z
    at_y = tl.load(matrix + 3) * away_z + tl.load(matrix + 4) * away_y + tl.load(matrix + 5) * away_x + half_y
    at_x = tl.load(matrix + 6) * away_z + tl.load(matrix + 7) * away_y + tl.load(matrix + 8) * away_x + half_x
    # What lies outside of the patch repeats its edge, in image and label alike
    at_z, at_y, at_x = _clamped(at_z, depth), _clamped(at_y, height), _clamped(at_x, width)
    low_z, low_y, low_x = tl.floor(at_z), tl.floor(at_y), tl.floor(at_x)
    part_z, part_y, part_x = at_z - low_z, at_y - low_y, at_x - low_x
    z0, y0, x0 = low_z.to(tl.int32), low_y.to(tl.int32), low_x.to(tl.int32)
    near_z = tl.where((part_z > 0.5) | ((part_z == 0.5) & (z0 % 2 == 1)), z0 + 1, z0)
    near_y = tl.where((part_y > 0.5) | ((part_y == 0.5) & (y0 % 2 == 1)), y0 + 1, y0)
    near_x = tl.where((part_x > 0.5) | ((part_x == 0.5) & (x0 % 2 == 1)), x0 + 1, x0)
    plane = lines.to(tl.int64) * columns
    place = tl.load(label_places + case) + (first_z + near_z) * plane + (first_y + near_y).to(tl.int64) * columns
    value = tl.load(labels + place + first_x + near_x, mask=there, other=0)
    tl.store(out_label + sample.to(tl.int64) * total + voxel, value, mask=there)
    z1 = tl.minimum(z0 + 1, depth - 1)
    y1 = tl.minimum(y0 + 1, height - 1)
    x1 = tl.minimum(x0 + 1, width - 1)
    base = images + tl.load(image_places + case)
    z0p, z1p = (first_z + z0) * plane, (first_z + z1) * plane
    y0p, y1p = (first_y + y0).to(tl.int64) * columns + first_x, (first_y + y1).to(tl.int64) * columns + first_x
    target = out + (sample.to(tl.int64) * total + voxel) * CHANNELS
    for channel in tl.static_range(CHANNELS):
        at = base + channel
        v000 = tl.load(at + (z0p + y0p + x0) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v001 = tl.load(at + (z0p + y0p + x1) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v010 = tl.load(at + (z0p + y1p + x0) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v011 = tl.load(at + (z0p + y1p + x1) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v100 = tl.load(at + (z1p + y0p + x0) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v101 = tl.load(at + (z1p + y0p + x1) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v110 = tl.load(at + (z1p + y1p + x0) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        v111 = tl.load(at + (z1p + y1p + x1) * CHANNELS, mask=there, other=0.0).to(tl.float32)
        front = (v000 * (1 - part_x) + v001 * part_x) * (1 - part_y) + (v010 * (1 - part_x) + v011 * part_x) * part_y
        back = (v100 * (1 - part_x) + v101 * part_x) * (1 - part_y) + (v110 * (1 - part_x) + v111 * part_x) * part_y
        tl.store(target + channel, front * (1 - part_z) + back * part_z, mask=there)
