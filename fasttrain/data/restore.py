"""Owns the way back: predictions on a preprocessed grid brought to the grid of the file, exactly where that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch.nn import functional

from fasttrain.data.grids import AxisMoves, exact_moves, index_map
from fasttrain.samples import Grid

_SLAB_VOXELS = 2_000_000
"""Coordinates are made for this many source voxels at a time, which bounds the extra memory at about 40 MiB."""
_EDGE_VOXELS = 0.5 + 1e-3
"""A voxel reaches half a voxel beyond its centre; the rest is rounding."""


def to_source_grid(
    values: torch.Tensor, grid: Grid, source_grid: Grid, mode: Literal["linear", "nearest"], fill: float
) -> torch.Tensor:
    """`values` [channel, *grid.shape] on `source_grid`, [channel, *source_grid.shape], on the same device.

    Where the grids differ by flips, permutations, crops and pads alone, values are moved and nothing is interpolated (the
    dtype is kept); else they are resampled at the same places in the world (float32). Source voxels outside `grid` get `fill`.
    """
    moves = exact_moves(source_grid, grid)
    if moves is not None:
        return _move(values, moves, source_grid.shape, fill)
    out = values.new_full((values.shape[0], *source_grid.shape), fill, dtype=torch.float32)
    for span, places, outside in _slabs(grid, source_grid, values.device):
        for channel in range(values.shape[0]):
            slab = _sample(values[channel], places, mode)
            slab[outside] = fill
            out[channel, span] = slab
    return out


def class_map_in_source_grid(probabilities: torch.Tensor, grid: Grid, source_grid: Grid) -> torch.Tensor:
    """The likeliest class of each source voxel, uint8 [*source_grid.shape], from [class, *grid.shape] scores.

    Scores are interpolated and compared one class at a time on slabs, so that no float volume of the source's size is ever
    held; ties go to the lower class. Voxels outside `grid` (cropped away) are background.
    """
    moves = exact_moves(source_grid, grid)
    if moves is not None:
        labels = probabilities.argmax(dim=0, keepdim=True).to(torch.uint8)
        return _move(labels, moves, source_grid.shape, 0)[0]
    out = torch.zeros(source_grid.shape, dtype=torch.uint8, device=probabilities.device)
    for span, places, outside in _slabs(grid, source_grid, probabilities.device):
        best = _sample(probabilities[0], places, "linear")
        winner = torch.zeros(best.shape, dtype=torch.uint8, device=best.device)
        for index in range(1, probabilities.shape[0]):
            score = _sample(probabilities[index], places, "linear")
            better = score > best
            winner.masked_fill_(better, index)
            best = torch.maximum(best, score)
        out[span] = winner.masked_fill_(outside, 0)
    return out


def _move(values: torch.Tensor, moves: AxisMoves, shape: tuple[int, ...], fill: float) -> torch.Tensor:
    """Axis a of the source runs along axis `moves.axes[a]` of `values`; what the two share is copied."""
    aligned = values.permute(0, *(axis + 1 for axis in moves.axes))
    flipped = [axis + 1 for axis, flip in enumerate(moves.flips) if flip]
    aligned = aligned.flip(flipped) if flipped else aligned
    take, put = [slice(None)], [slice(None)]
    for length, wanted, flip, offset in zip(aligned.shape[1:], shape, moves.flips, moves.offsets, strict=True):
        begin = length - 1 - offset if flip else offset
        low, high = max(0, -begin), min(wanted, length - begin)
        put.append(slice(low, max(low, high)))
        take.append(slice(low + begin, max(low, high) + begin))
    if all(one == slice(0, length) for one, length in zip(put[1:], shape, strict=True)):
        return aligned[tuple(take)].contiguous()
    out = values.new_full((values.shape[0], *shape), fill)
    out[tuple(put)] = aligned[tuple(take)]
    return out


def _slabs(grid: Grid, source_grid: Grid, device: torch.device) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For runs of the source's first axis: the slice, grid_sample's coordinates [*slab, axes], and what lies outside."""
    dimensions = len(grid.shape)
    matrix = torch.from_numpy(index_map(source_grid, grid))
    linear, offset = matrix[:dimensions, :dimensions], matrix[:dimensions, 3]
    area = 1
    for length in source_grid.shape[1:]:
        area *= length
    step = max(1, _SLAB_VOXELS // area)
    for first in range(0, source_grid.shape[0], step):
        last = min(first + step, source_grid.shape[0])
        ranges = [torch.arange(first, last, dtype=torch.float64)]
        ranges += [torch.arange(length, dtype=torch.float64) for length in source_grid.shape[1:]]
        shape = tuple(len(one) for one in ranges)
        outside = torch.zeros(shape, dtype=torch.bool, device=device)
        places = torch.empty((*shape, dimensions), dtype=torch.float32, device=device)
        for axis, length in enumerate(grid.shape):
            index = offset[axis].to(torch.float32).to(device).expand(shape)
            for along, steps in enumerate(ranges):
                # One axis' products are formed in float64 and only their sum in float32: 1e-4 voxel at 1000 voxels.
                term = (linear[axis, along] * steps).to(torch.float32).to(device)
                index = index + term.view([-1 if other == along else 1 for other in range(dimensions)])
            outside |= (index < -_EDGE_VOXELS) | (index > length - 1 + _EDGE_VOXELS)
            # grid_sample wants the last axis first; a single voxel has no extent to scale by.
            places[..., dimensions - 1 - axis] = index * (2.0 / (length - 1)) - 1.0 if length > 1 else 0.0
        yield slice(first, last), places, outside


def _sample(channel: torch.Tensor, places: torch.Tensor, mode: str) -> torch.Tensor:
    sampled = functional.grid_sample(
        channel[None, None].to(torch.float32),
        places[None],
        mode="nearest" if mode == "nearest" else "bilinear",
        padding_mode="border",
        align_corners=True,
    )
    return sampled[0, 0]
