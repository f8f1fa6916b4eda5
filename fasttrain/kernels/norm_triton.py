"""Owns the Triton kernels of a normalisation with what follows it, over channels-last tensors; imported where Triton is there.

A tensor is seen as [group, row, channel]: a group is what statistics are taken over (one image of a batch, or the whole batch),
a row is a voxel. The channels of a row lie side by side; rows may lie further apart, as they do in a slice of channels, so every
tensor comes with the distance of its groups and of its rows, in elements.

What is computed of x̂ = (x − mean) · rstd is z = drop(weight · x̂ + bias), then, by `ADDED` (0: nothing is added, 1: before the
activation, 2: after it), y = act(z), act(z + added) or act(z) + added. `ACTIVATION` is 0 for none, 1 for a leaky ReLU of the
constant `bend`, 2 for one whose slope is learnt and lies at `slope`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moments_norm(
    x, partial, rows, channels, x_group, x_row, chunk_rows,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [group, chunk, 2, channel]: sums of x − shift and of its square over a chunk of rows; shift is row 0 of
    the group.
    """
    group, chunk, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    base = x + group.to(tl.int64) * x_group
    shift = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = (row < last)[:, None] & inside[None, :]
        value = tl.load(base + row[:, None].to(tl.int64) * x_row + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        value = tl.where(there, value - shift[None, :], 0.0)
        sums += value
        squares += value * value
    place = partial + (group * tl.num_programs(1) + chunk).to(tl.int64) * 2 * channels + column
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(squares, 0), mask=inside)


@triton.jit
def _common(values, BLOCK_C: tl.constexpr, SHARED: tl.constexpr):
    """The mean over each `SHARED` neighbouring channels, at every one of them."""
    means = tl.sum(tl.reshape(values, [BLOCK_C // SHARED, SHARED]), 1) / SHARED
    return tl.reshape(tl.broadcast_to(means[:, None], [BLOCK_C // SHARED, SHARED]), [BLOCK_C])


@triton.jit
def statistics_norm(
    x, partial, mean, rstd, running_mean, running_var, rows, channels, x_group, chunks, epsilon, momentum,
    SHARED: tl.constexpr, RUNNING: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean, rstd [group, channel] from the partial sums; `SHARED` neighbouring channels have their statistics in common."""
    group, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    sums = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    for start in range(0, chunks, BLOCK_K):
        chunk = start + tl.arange(0, BLOCK_K)
        there = (chunk < chunks)[:, None] & inside[None, :]
        place = partial + (group * chunks + chunk).to(tl.int64)[:, None] * 2 * channels + column[None, :]
        sums += tl.load(place, mask=there, other=0.0)
        squares += tl.load(place + channels, mask=there, other=0.0)
    shift = tl.load(x + group.to(tl.int64) * x_group + column, mask=inside, other=0.0).to(tl.float32)
    off = tl.sum(sums, 0) / rows
    variance = tl.maximum(tl.sum(squares, 0) / rows - off * off, 0.0)
    middle = shift + off
    if SHARED > 1:
        common = _common(middle, BLOCK_C, SHARED)
        away = middle - common
        variance = _common(variance + away * away, BLOCK_C, SHARED)
        middle = common
    tl.store(mean + group * channels + column, middle, mask=inside)
    tl.store(rstd + group * channels + column, 1.0 / tl.sqrt(variance + epsilon), mask=inside)
    if RUNNING:
        kept = tl.load(running_mean + column, mask=inside, other=0.0)
        tl.store(running_mean + column, kept + momentum * (middle - kept), mask=inside)
        kept = tl.load(running_var + column, mask=inside, other=0.0)
        unbiased = variance * (rows / tl.maximum(rows - 1, 1))
        tl.store(running_var + column, kept + momentum * (unbiased - kept), mask=inside)


@triton.jit
def _per_channel(place, column, inside, ONE: tl.constexpr, GIVEN: tl.constexpr):
    """A weight (`ONE` 1) or bias (`ONE` 0) a channel, float32; where none is given, 1 or 0."""
    if GIVEN:
        return tl.load(place + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, ONE, ONE).to(tl.float32)


@triton.jit
def _dropped(value, seed, chance, group, row, column, rows, channels):
    """Dropout by a function of the seed and the element's place alone, so that backward drops the same."""
    place = (group * rows + row) * channels + column[None, :]
    kept = tl.rand(tl.load(seed), place.to(tl.uint32)) >= chance
    return tl.where(kept, value / (1.0 - chance), 0.0)


@triton.jit
def forward_norm(
    x, y, added, mean, rstd, weight, bias, slope, seed, bend, chance, rows, channels,
    x_group, x_row, y_group, y_row, added_group, added_row, statistics_group,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Writes y."""
    group, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    middle = tl.load(mean + group * statistics_group + column, mask=inside, other=0.0)
    scale = tl.load(rstd + group * statistics_group + column, mask=inside, other=0.0)
    factor = scale * _per_channel(weight, column, inside, 1, WEIGHTED)
    offset = _per_channel(bias, column, inside, 0, WEIGHTED)
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
    there = (row < rows) & inside[None, :]
    value = tl.load(x + group * x_group + row * x_row + column[None, :], mask=there, other=0.0).to(tl.float32)
    value = (value - middle[None, :]) * factor[None, :] + offset[None, :]
    if DROPOUT:
        value = _dropped(value, seed, chance, group, row, column, rows, channels)
    if ADDED == 1:
        value += tl.load(added + group * added_group + row * added_row + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
    if ACTIVATION == 1:
        value = tl.where(value > 0, value, value * bend)
    if ACTIVATION == 2:
        value = tl.where(value > 0, value, value * tl.load(slope).to(tl.float32))
    if ADDED == 2:
        value += tl.load(added + group * added_group + row * added_row + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
    tl.store(y + group * y_group + row * y_row + column[None, :], value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _inner_gradient(
    x, y, dy, mean, rstd, weight, bias, slope, seed, bend, chance, group, row, column, inside, rows, channels, there,
    x_group, x_row, y_group, y_row, dy_group, dy_row,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """x̂, the gradient at the sum that the activation sees, that at weight · x̂ + bias, and what each element adds to
    the slope's.
    """
    middle = tl.load(mean + group * channels + column, mask=inside, other=0.0)
    scale = tl.load(rstd + group * channels + column, mask=inside, other=0.0)
    value = tl.load(x + group * x_group + row * x_row + column[None, :], mask=there, other=0.0).to(tl.float32)
    normal = (value - middle[None, :]) * scale[None, :]
    outer = tl.load(dy + group * dy_group + row * dy_row + column[None, :], mask=there, other=0.0).to(tl.float32)
    bent = outer * 0.0
    if ACTIVATION > 0:
        if ADDED == 1:
            # A leaky ReLU keeps the sign, and what was added is not at hand
            inner = tl.load(y + group * y_group + row * y_row + column[None, :], mask=there, other=0.0).to(tl.float32)
        else:
            inner = normal * _per_channel(weight, column, inside, 1, WEIGHTED)[None, :]
            inner += _per_channel(bias, column, inside, 0, WEIGHTED)[None, :]
            if DROPOUT:
                inner = _dropped(inner, seed, chance, group, row, column, rows, channels)
        if ACTIVATION == 2:
            bent = tl.where(inner > 0, 0.0, outer * inner)
            outer = tl.where(inner > 0, outer, outer * tl.load(slope).to(tl.float32))
        else:
            outer = tl.where(inner > 0, outer, outer * bend)
    before = outer
    if DROPOUT:
        before = _dropped(outer, seed, chance, group, row, column, rows, channels)
    return normal, outer, before, bent


@triton.jit
def backward_sums_norm(
    x, y, dy, partial, mean, rstd, weight, bias, slope, seed, bend, chance, rows, channels, chunk_rows,
    x_group, x_row, y_group, y_row, dy_group, dy_row,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [group, chunk, 3, channel]: sums of the gradient at weight · x̂ + bias, of that times x̂, and of the slope's."""
    group, chunk, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    products = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    slopes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_R):
        row = (start + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
        there = (row < last) & inside[None, :]
        normal, _, before, bent = _inner_gradient(
            x, y, dy, mean, rstd, weight, bias, slope, seed, bend, chance, group, row, column, inside, rows, channels, there,
            x_group, x_row, y_group, y_row, dy_group, dy_row, WEIGHTED, ACTIVATION, DROPOUT, ADDED,
        )  # fmt: skip
        sums += before
        products += before * normal
        if ACTIVATION == 2:
            slopes += bent
    place = partial + (group * tl.num_programs(1) + chunk) * 3 * channels + column
    tl.store(place, tl.sum(sums, 0), mask=inside)
    tl.store(place + channels, tl.sum(products, 0), mask=inside)
    if ACTIVATION == 2:
        tl.store(place + 2 * channels, tl.sum(slopes, 0), mask=inside)


@triton.jit
def backward_statistics_norm(
    partial, gradients, weight, rows, channels, chunks,
    WEIGHTED: tl.constexpr, LEARNT: tl.constexpr, SHARED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """gradients [5, group, channel]: of weight and bias by group, the slope's, and the means of weight · dz and weight
    · dz · x̂.
    """
    group, part, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    sums = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    products = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    slopes = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    for start in range(0, chunks, BLOCK_K):
        chunk = start + tl.arange(0, BLOCK_K)
        there = (chunk < chunks)[:, None] & inside[None, :]
        place = partial + (group * chunks + chunk).to(tl.int64)[:, None] * 3 * channels + column[None, :]
        sums += tl.load(place, mask=there, other=0.0)
        products += tl.load(place + channels, mask=there, other=0.0)
        if LEARNT:
            slopes += tl.load(place + 2 * channels, mask=there, other=0.0)
    total, product = tl.sum(sums, 0), tl.sum(products, 0)
    factor = _per_channel(weight, column, inside, 1, WEIGHTED)
    first, second = total * factor / rows, product * factor / rows
    if SHARED > 1:
        first, second = _common(first, BLOCK_C, SHARED), _common(second, BLOCK_C, SHARED)
    place = gradients + group * channels + column
    step = groups * channels
    tl.store(place, product, mask=inside)
    tl.store(place + step, total, mask=inside)
    if LEARNT:
        tl.store(place + 2 * step, tl.sum(slopes, 0), mask=inside)
    tl.store(place + 3 * step, first, mask=inside)
    tl.store(place + 4 * step, second, mask=inside)


@triton.jit
def backward_norm(
    x, y, dy, dx, dadded, gradients, mean, rstd, weight, bias, slope, seed, bend, chance, rows, channels,
    x_group, x_row, y_group, y_row, dy_group, dy_row, dx_group, dx_row,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Writes dx, and where `added` was added before the activation its gradient, which lies as dx does."""
    group, part, groups = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(1)
    column = part * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < channels
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
    there = (row < rows) & inside[None, :]
    normal, outer, before, _ = _inner_gradient(
        x, y, dy, mean, rstd, weight, bias, slope, seed, bend, chance, group, row, column, inside, rows, channels, there,
        x_group, x_row, y_group, y_row, dy_group, dy_row, WEIGHTED, ACTIVATION, DROPOUT, ADDED,
    )  # fmt: skip
    place = gradients + group * channels + column
    step = groups * channels
    first = tl.load(place + 3 * step, mask=inside, other=0.0)
    second = tl.load(place + 4 * step, mask=inside, other=0.0)
    scale = tl.load(rstd + group * channels + column, mask=inside, other=0.0)
    factor = _per_channel(weight, column, inside, 1, WEIGHTED)
    value = (before * factor[None, :] - first[None, :] - normal * second[None, :]) * scale[None, :]
    target = group * dx_group + row * dx_row + column[None, :]
    tl.store(dx + target, value.to(dx.dtype.element_ty), mask=there)
    if ADDED == 1:
        tl.store(dadded + target, outer.to(dadded.dtype.element_ty), mask=there)
