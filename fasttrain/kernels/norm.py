"""Owns a normalisation with what follows it (dropout, an addition, an activation) as one operation in one memory layout.

cuDNN's and torch's instance norm take NCDHW: in a channels-last network each one copies its input there and back. Here the
statistics are taken over channels-last memory as it lies, and what follows is computed in the same pass: two reads and a write
forward, four reads and a write backward. Sources: Ulyanov et al. 2016 (instance), Ioffe and Szegedy 2015 (batch), Wu and He
2018 (group).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.kernels.rows import as_rows, channels_last, kernels_take

_ELEMENTS = 4096
"""Of a tile that one program holds."""
_MOST_COLUMNS = 128
_PROGRAMS = 1056
"""Eight for each multiprocessor of an H100: what a pass that sums is cut into."""


@dataclass(frozen=True)
class After:
    """What follows the norm: dropout by `chance`, an addition before or after the activation, a leaky ReLU of a constant slope
    (None: none, or one whose slope is learnt and given beside).
    """

    slope: float | None = None
    chance: float = 0.0
    added: Literal["no", "before", "after"] = "no"


@dataclass(frozen=True)
class Over:
    """What statistics are taken over: each image of a batch by itself, or all of them; `shared` neighbouring channels
    together.
    """

    images: bool = True
    shared: int = 1
    epsilon: float = 1e-5
    momentum: float = 0.1


def usable(x: Tensor, over: Over) -> bool:
    """Whether the kernels can take this tensor: on a GPU, with Triton there, and channels that fall into blocks."""
    if over.shared & (over.shared - 1) or over.shared > _MOST_COLUMNS or x.shape[1] % over.shared:
        return False
    if over.shared > 1 and x.shape[1] & (x.shape[1] - 1):
        return False
    return kernels_take(x)


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    over: Over,
    after: After,
    added: Tensor | None = None,
    slope: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Training's normalisation of x [batch, channel, *spatial], which lies channels-last (else it is copied so).

    weight, bias: [channel] or None. added: like x. slope: one learnt value, in place of `after.slope`. running: mean and
    variance [channel], moved on in place. Dropout is drawn from torch's generator of the device. Differentiable once.
    """
    seed = torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=x.device) if after.chance > 0 else None
    mean, var = running if running is not None else (None, None)
    result: Tensor = _Normalise.apply(x, weight, bias, added, slope, seed, mean, var, over, after)
    return result


def plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    over: Over,
    after: After,
    added: Tensor | None = None,
    slope: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The same as `normalise` in torch's own operations, for any device; dropout has other draws."""
    if over.shared > 1 or (over.images and running is None):
        # A GPU's group_norm takes weights of its input's type alone
        given = x if weight is None else x.to(weight.dtype)
        y = functional.group_norm(given, x.shape[1] // over.shared, weight, bias, over.epsilon).to(x.dtype)
    else:
        mean, var = running if running is not None else (None, None)
        y = functional.batch_norm(x, mean, var, weight, bias, True, over.momentum, over.epsilon)
    if after.chance > 0:
        y = functional.dropout(y, after.chance)
    return finished(y, after, added, slope)


def finished(y: Tensor, after: After, added: Tensor | None, slope: Tensor | None) -> Tensor:
    """What `after` adds to a normalised y, but for the dropout."""
    if after.added == "before" and added is not None:
        y = y + added
    if slope is not None:
        y = functional.prelu(y, slope.to(y.dtype))
    elif after.slope is not None:
        y = functional.leaky_relu(y, after.slope)
    return y + added if after.added == "after" and added is not None else y


class _Grid:
    """How a tensor of so many groups, rows and channels is cut into programs."""

    def __init__(self, x: Tensor, images: bool) -> None:
        self.channels = x.shape[1]
        self.groups = x.shape[0] if images else 1
        self.rows = x.numel() // (self.channels * self.groups)
        self.columns = min(1 << (self.channels - 1).bit_length(), _MOST_COLUMNS)
        self.parts = math.ceil(self.channels / self.columns)
        self.block_rows = max(_ELEMENTS // self.columns, 1)
        blocks = math.ceil(self.rows / self.block_rows)
        chunks = max(min(blocks, _PROGRAMS // (self.groups * self.parts)), 1)
        self.chunk_rows = math.ceil(blocks / chunks) * self.block_rows
        self.chunks = math.ceil(self.rows / self.chunk_rows)
        self.block_chunks = min(1 << (self.chunks - 1).bit_length(), max(_ELEMENTS // self.columns, 1))

    @property
    def summing(self) -> tuple[int, int, int]:
        return self.groups, self.chunks, self.parts

    @property
    def writing(self) -> tuple[int, int, int]:
        return math.ceil(self.rows / self.block_rows), self.groups, self.parts


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x, weight, bias, added, slope, seed, running_mean, running_var, over: Over, after: After
    ) -> Tensor:
        from fasttrain.kernels import norm_triton as kernels

        grid, seen = _Grid(x, over.images), as_rows(x, over.images)
        x = seen.tensor
        y = torch.empty_like(x, memory_format=channels_last(x))
        out = as_rows(y, over.images)
        more = as_rows(added, over.images) if added is not None else seen
        blocks = {"BLOCK_R": grid.block_rows, "BLOCK_C": grid.columns}
        partial = x.new_empty((grid.groups, grid.chunks, 2, grid.channels), dtype=torch.float32)
        mean, rstd = x.new_empty((2, grid.groups, grid.channels), dtype=torch.float32)
        kernels.moments_norm[grid.summing](
            x, partial, grid.rows, grid.channels, seen.group, seen.row, grid.chunk_rows, **blocks
        )
        kernels.statistics_norm[grid.groups, grid.parts](
            x, partial, mean, rstd, running_mean, running_var, grid.rows, grid.channels, seen.group, grid.chunks,
            over.epsilon, over.momentum,
            SHARED=over.shared, RUNNING=running_mean is not None, BLOCK_K=grid.block_chunks, BLOCK_C=grid.columns,
        )  # fmt: skip
        kernels.forward_norm[grid.writing](
            x, y, more.tensor, mean, rstd, weight, bias, slope, seed, after.slope or 0.0, after.chance,
            grid.rows, grid.channels, seen.group, seen.row, out.group, out.row, more.group, more.row, grid.channels,
            **_constants(weight, slope, after), **blocks,
        )  # fmt: skip
        ctx.save_for_backward(x, y if after.added == "before" else x, weight, bias, slope, seed, mean, rstd)
        ctx.over, ctx.after, ctx.set_materialize_grads = over, after, False
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fasttrain.kernels import norm_triton as kernels

        x, y, weight, bias, slope, seed, mean, rstd = ctx.saved_tensors
        over, after = ctx.over, ctx.after
        grid, seen, made, given = (
            _Grid(x, over.images),
            as_rows(x, over.images),
            as_rows(y, over.images),
            as_rows(dy, over.images),
        )
        learnt = slope is not None
        dx = torch.empty_like(x, memory_format=channels_last(x))
        out = as_rows(dx, over.images)
        dadded = torch.empty_like(dx) if after.added == "before" else dx
        constants = _constants(weight, slope, after)
        blocks = {"BLOCK_R": grid.block_rows, "BLOCK_C": grid.columns}
        strides = (seen.group, seen.row, made.group, made.row, given.group, given.row)
        scalars = (mean, rstd, weight, bias, slope, seed, after.slope or 0.0, after.chance, grid.rows, grid.channels)
        partial = x.new_empty((grid.groups, grid.chunks, 3, grid.channels), dtype=torch.float32)
        gradients = x.new_empty((5, grid.groups, grid.channels), dtype=torch.float32)
        kernels.backward_sums_norm[grid.summing](
            x, y, given.tensor, partial, *scalars, grid.chunk_rows, *strides, **constants, **blocks
        )
        kernels.backward_statistics_norm[grid.groups, grid.parts](
            partial, gradients, weight, grid.rows, grid.channels, grid.chunks,
            WEIGHTED=weight is not None, LEARNT=learnt, SHARED=over.shared,
            BLOCK_K=grid.block_chunks, BLOCK_C=grid.columns,
        )  # fmt: skip
        kernels.backward_norm[grid.writing](
            x, y, given.tensor, dx, dadded, gradients, *scalars, *strides, out.group, out.row, **constants, **blocks
        )
        dweight = dbias = dslope = None
        if weight is not None:
            dweight, dbias = gradients[:2].sum(1).to(weight.dtype)
        if learnt:
            dslope = gradients[2].sum().reshape(slope.shape).to(slope.dtype)
        gave = {"no": None, "before": dadded, "after": dy}[after.added]
        return dx, dweight, dbias, gave, dslope, None, None, None, None, None


def _constants(weight: Tensor | None, slope: Tensor | None, after: After) -> dict[str, Any]:
    return {
        "WEIGHTED": weight is not None,
        "ACTIVATION": 2 if slope is not None else 1 if after.slope is not None else 0,
        "DROPOUT": after.chance > 0,
        "ADDED": {"no": 0, "before": 1, "after": 2}[after.added],
    }
