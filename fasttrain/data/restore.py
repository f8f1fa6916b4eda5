"""Owns the way back: predictions on a preprocessed grid brought to the grid of the file, exactly where that is possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from fasttrain.data.grids import AxisMoves, exact_moves, index_map
from fasttrain.samples import Grid

_SLAB_VOXELS = 2_000_000
"""Coordinates are made for this many source voxels at a time, which bounds the extra memory at about 40 MiB."""
_SLAB_VALUES = 1 << 23
"""Scores of all classes that are compared at a time on a CPU: 32 MiB."""
_GPU_SLABS = 8
"""On a GPU slabs are so many times larger, since each costs launches."""
_EDGE_VOXELS = 0.5 + 1e-3
"""A voxel reaches half a voxel beyond its centre; the rest is rounding."""
_STRAY_VOXELS = 1e-4
"""So little an axis may lean on others and still count as linked to one alone."""


Decide = Callable[[torch.Tensor], torch.Tensor]
"""From scores [channel, *spatial] to class indices [*spatial]."""


def likeliest_class(scores: torch.Tensor) -> torch.Tensor:
    """The class with the highest score; of equal ones the lower."""
    return scores.argmax(dim=0)


def drawn_regions(written: Sequence[int], exact: Sequence[tuple[int, int]] = ()) -> Decide:
    """For probabilities of regions that may overlap: a voxel becomes the class `written` of the last region that is likelier
    there than not, and background where none is. exact: (bits, class index) of voxels that become another: bit n is set where
    region n is likelier than not.
    """

    def decide(scores: torch.Tensor) -> torch.Tensor:
        classes = torch.zeros(scores.shape[1:], dtype=torch.uint8, device=scores.device)
        for region, class_index in zip(scores, written, strict=True):
            classes.masked_fill_(region > 0.5, class_index)
        if exact:
            bits = torch.zeros(scores.shape[1:], dtype=torch.int32, device=scores.device)
            for number, region in enumerate(scores):
                bits.add_(region > 0.5, alpha=1 << number)
            for own, class_index in exact:
                classes.masked_fill_(bits == own, class_index)
        return classes

    return decide


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
    for span, places, outside in _slabs(_Link.between(source_grid, grid), values.device, _SLAB_VOXELS):
        for channel in range(values.shape[0]):
            slab = _sample(values[channel, None], places, mode)[0]
            out[channel, span] = slab.masked_fill_(outside, fill)
    return out


def class_map_in_source_grid(
    probabilities: torch.Tensor, grid: Grid, source_grid: Grid, decide: Decide = likeliest_class
) -> torch.Tensor:
    """The class of each source voxel, uint8 [*source_grid.shape], from [class, *grid.shape] scores, by default the likeliest.

    Scores are interpolated and compared on slabs, so that no float volume of the source's size is ever held; ties go to the
    lower class. Voxels outside `grid` (cropped away) are background.
    """
    growing = GrowingClassMap(grid.shape, probabilities.device, grid, source_grid, decide)
    growing.add(0, 0, probabilities)
    return growing.finished()


class GrowingClassMap:
    """The class of each voxel as `decide` has it, made of scores that come in order along one axis.

    Without `source_grid` on the scores' own grid, of `shape`; else brought to that of the file, as by `class_map_in_source_grid`.
    Where the two are linked axis by axis, as preprocessing leaves them, no more scores are held than resampling reads again;
    else all of them, until they are there.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        grid: Grid | None = None,
        source_grid: Grid | None = None,
        decide: Decide = likeliest_class,
    ) -> None:
        self.shape = shape
        self._decide = decide
        self._source_grid = source_grid
        self._moves: AxisMoves | None = None
        self._link: _Link | None = None
        if source_grid is not None:
            assert grid is not None
            self._moves = exact_moves(source_grid, grid)
            self._link = None if self._moves is not None else _Link.between(source_grid, grid)
        shown = self._link.source_shape if self._link is not None else shape
        self._map = torch.zeros(shown, dtype=torch.uint8, device=device)
        self._held: torch.Tensor | None = None
        self._held_begin = 0
        self._filled = 0
        """Planes of the source that are done, in the order in which the scores' axis runs."""

    def add(self, axis: int, begin: int, probabilities: torch.Tensor) -> None:
        """Takes the scores [class, *spatial] of the planes from `begin` on along spatial `axis`; keeps no view of them."""
        planes = probabilities.shape[axis + 1]
        if self._link is None:
            self._map.narrow(axis, begin, planes).copy_(self._decide(probabilities))
        elif planes == self.shape[axis]:
            self._link.classes(probabilities, self._map, self._decide)
        elif (along := self._link.source_axis(axis)) is None:
            self._keep_all(axis, begin, probabilities, self._link)
        else:
            self._fill(axis, along, probabilities, self._link)

    def finished(self) -> torch.Tensor:
        """The map, uint8 [*spatial]."""
        if self._moves is None or self._source_grid is None:
            return self._map
        return _move(self._map[None], self._moves, self._source_grid.shape, 0)[0]

    def _keep_all(self, axis: int, begin: int, probabilities: torch.Tensor, link: _Link) -> None:
        if self._held is None:
            self._held = probabilities.new_empty((len(probabilities), *self.shape))
        planes = probabilities.shape[axis + 1]
        self._held.narrow(axis + 1, begin, planes).copy_(probabilities)
        if begin + planes == self.shape[axis]:
            link.classes(self._held, self._map, self._decide)
            self._held = None

    def _fill(self, axis: int, along: int, probabilities: torch.Tensor, link: _Link) -> None:
        """Source planes across `along` whose neighbours across `axis` are all there."""
        held = probabilities if self._held is None else torch.cat([self._held, probabilities], dim=axis + 1)
        end = self._held_begin + held.shape[axis + 1]
        lowest, highest = link.neighbours(axis, along)
        ready = int(np.searchsorted(highest, end))
        if ready > self._filled:
            first, last = self._filled, ready
            if link.linear[axis, along] < 0:
                first, last = len(highest) - ready, len(highest) - self._filled
            part = link.part(axis, self._held_begin, held.shape[axis + 1], along, first, last)
            part.classes(held, self._map.narrow(along, first, last - first), self._decide)
            self._filled = ready
        wanted = int(lowest[ready]) if ready < len(lowest) else end
        left = max(end - wanted, 0)
        self._held = held.narrow(axis + 1, held.shape[axis + 1] - left, left).clone() if left else None
        self._held_begin = end - left


class GrowingDose:
    """A dose in Gy, float32 [*spatial] of the source, made of answers [1, *spatial] that come in order along one axis."""

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        scale: float,
        grid: Grid | None = None,
        source_grid: Grid | None = None,
    ) -> None:
        self._dose = torch.zeros((1, *shape), device=device)
        self._scale = scale
        self._grids = None if grid is None or source_grid is None else (grid, source_grid)

    def add(self, axis: int, begin: int, answers: torch.Tensor) -> None:
        """Takes the answers of the planes from `begin` on along spatial `axis`; keeps no view of them."""
        self._dose.narrow(axis + 1, begin, answers.shape[axis + 1]).copy_(answers)

    def finished(self) -> torch.Tensor:
        """The dose, 0 outside of the grid it was predicted on."""
        dose = self._dose if self._grids is None else to_source_grid(self._dose, *self._grids, "linear", 0.0)
        return dose[0].to(torch.float32) * self._scale


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


@dataclass(frozen=True, eq=False)
class _Link:
    """Where the voxels of a source lie among others: index = `linear` · source index + `offset`, float64."""

    linear: np.ndarray
    offset: np.ndarray
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def between(source_grid: Grid, grid: Grid) -> _Link:
        matrix, dimensions = index_map(source_grid, grid), len(grid.shape)
        return _Link(matrix[:dimensions, :dimensions], matrix[:dimensions, 3], source_grid.shape, grid.shape)

    def source_axis(self, axis: int) -> int | None:
        """The only source axis on which the index along `axis` hangs; None where it hangs on several."""
        reach = np.abs(self.linear[axis]) * (np.array(self.source_shape) - 1)
        along = int(np.abs(self.linear[axis]).argmax())
        return along if np.delete(reach, along).sum() <= _STRAY_VOXELS else None

    def neighbours(self, axis: int, along: int) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) plane across `axis` that interpolation reads for the planes across source axis `along`, rising."""
        places = self.linear[axis, along] * np.arange(self.source_shape[along]) + self.offset[axis]
        places = np.sort(places)
        last = self.shape[axis] - 1
        lowest = np.floor(places - 2 * _STRAY_VOXELS).clip(0, last)
        return lowest.astype(np.int64), np.ceil(places + 2 * _STRAY_VOXELS).clip(0, last).astype(np.int64)

    def part(self, axis: int, begin: int, planes: int, along: int, first: int, last: int) -> _Link:
        """The link of the source planes first … last − 1 across `along` with the planes from `begin` on across `axis`."""
        offset = self.offset + self.linear[:, along] * first
        offset[axis] -= begin
        cut = lambda shape, place, length: (*shape[:place], length, *shape[place + 1 :])  # noqa: E731
        return replace(
            self,
            offset=offset,
            source_shape=cut(self.source_shape, along, last - first),
            shape=cut(self.shape, axis, planes),
        )

    def classes(self, scores: torch.Tensor, out: torch.Tensor, decide: Decide) -> None:
        """Writes the class of each source voxel into `out`."""
        scores = scores.to(torch.float32)
        voxels = min(_SLAB_VOXELS, _SLAB_VALUES // len(scores))
        if scores.device.type == "cuda":
            voxels *= _GPU_SLABS
        for span, places, outside in _slabs(self, scores.device, voxels):
            out[span] = decide(_sample(scores, places, "linear")).masked_fill_(outside, 0)


def _slabs(link: _Link, device: torch.device, voxels: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For runs of the source's first axis: the slice, grid_sample's coordinates [*slab, axes], and what lies outside.

    Nothing is copied from the host, so that a GPU is never waited for.
    """
    dimensions = len(link.shape)
    step = max(1, voxels // max(math.prod(link.source_shape[1:]), 1))
    for first in range(0, link.source_shape[0], step):
        last = min(first + step, link.source_shape[0])
        ranges = [torch.arange(first, last, dtype=torch.float64, device=device)]
        ranges += [torch.arange(length, dtype=torch.float64, device=device) for length in link.source_shape[1:]]
        shape = tuple(len(one) for one in ranges)
        outside = torch.zeros(shape, dtype=torch.bool, device=device)
        places = torch.empty((*shape, dimensions), dtype=torch.float32, device=device)
        for axis, length in enumerate(link.shape):
            index = torch.full(shape, float(link.offset[axis]), dtype=torch.float32, device=device)
            for along, steps in enumerate(ranges):
                # One axis' products are formed in float64 and only their sum in float32: 1e-4 voxel at 1000 voxels.
                term = (steps * float(link.linear[axis, along])).to(torch.float32)
                index += term.view([-1 if other == along else 1 for other in range(dimensions)])
            outside |= (index < -_EDGE_VOXELS) | (index > length - 1 + _EDGE_VOXELS)
            # grid_sample wants the last axis first; a single voxel has no extent to scale by.
            places[..., dimensions - 1 - axis] = index * (2.0 / (length - 1)) - 1.0 if length > 1 else 0.0
        yield slice(first, last), places, outside


def _sample(channels: torch.Tensor, places: torch.Tensor, mode: str) -> torch.Tensor:
    """[channel, *slab] of [channel, *spatial], float32."""
    return functional.grid_sample(
        channels[None].to(torch.float32),
        places[None],
        mode="nearest" if mode == "nearest" else "bilinear",
        padding_mode="border",
        align_corners=True,
    )[0]
