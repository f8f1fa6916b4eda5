"""Owns the changes of a batch's intensities on the device: a fixed sequence of launches, told by a table who is changed and how.

No launch depends on what was drawn, and nothing is read back, so that the whole can stand in a CUDA graph whose input is the
table. Maps (shift, factors, contrast, the return to a former mean and deviation) are not written by themselves but taken along
by the next pass over the voxels; a pass that writes also takes the moments that the next technique asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fasttrain.kernels import intensity_columns as columns
from fasttrain.kernels.intensity_columns import CONTRAST, GAMMA, GAMMA_INVERTED, LOW_RESOLUTION, NOISE, SHADE
from fasttrain.kernels.intensity_plain import plain
from fasttrain.kernels.intensity_table import Chain
from fasttrain.kernels.rows import kernels_take

__all__ = ["Chain", "apply", "plain"]

_BLOCK = 2048
_WARPS = 8
_BLOCK_SETTLED = 256
_AXES = 3


def apply(image: Tensor, table: Tensor, chain: Chain) -> Tensor:
    """image: [sample, channel, *spatial] float32, 2D or 3D, changed in place; table: int32 [sample, channel · COLUMNS] beside it.

    Noise, blur, shift and factors, contrast, low resolution, inverted gamma, gamma: those that `chain` names.
    """
    if not (kernels_take(image) and image.dtype == torch.float32):
        return image.copy_(plain(image, table, chain))
    dense = image if _dense(image) else image.contiguous()
    _Launches(dense, table, chain).run()
    return image if dense is image else image.copy_(dense)


def _dense(image: Tensor) -> bool:
    return image.is_contiguous() or image.movedim(1, -1).is_contiguous()


@dataclass(eq=False)
class _Launches:
    """Of one batch. `waiting`: bits of those whose map has not been written yet."""

    image: Tensor
    table: Tensor
    chain: Chain
    waiting: int = 0
    clipped: bool = False
    moments_there: bool = False
    _spare: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        image = self.image
        self.samples, self.channels = image.shape[:2]
        self.size = (1,) * (_AXES + 2 - image.ndim) + tuple(image.shape[2:])
        self.voxels = math.prod(self.size)
        self.blocks = math.ceil(self.voxels / _BLOCK)
        channels_last = image.movedim(1, -1).is_contiguous()
        within = (1, self.channels) if channels_last else (self.voxels, 1)
        self.steps = (self.voxels * self.channels, *within)
        self.numbers = self.table.view(torch.float32)
        self.partial = image.new_empty((self.samples * self.channels, 4, self.blocks))
        self.settled = image.new_empty((self.samples * self.channels, columns.SETTLED))
        self.maps = self._table_maps
        self.grid = (self.blocks * self.channels, self.samples)

    def run(self) -> None:
        """Everything that the chain names, in its order."""
        chain = self.chain
        self.waiting = SHADE if chain.shade else 0
        if chain.noise:
            # Contrast needs moments of what comes before the shade, which is a map for it as well
            along = not chain.blur_radius and not chain.contrast
            self._points(NOISE, self._take_waiting() if along else 0, wants=0 if chain.blur_radius else self._asking())
        if chain.blur_radius:
            self._blur()
        if chain.contrast:
            self._need_moments(CONTRAST)
            self._settle(stretches=CONTRAST)
            self.waiting |= CONTRAST
            self.clipped = chain.clips
        if chain.low_resolution:
            self._low_resolution()
        if chain.gamma_inverted is not None:
            self._gamma(GAMMA_INVERTED, chain.gamma_inverted)
        if chain.gamma is not None:
            self._gamma(GAMMA, chain.gamma)
        if self.waiting:
            self._points(0, self._take_waiting(), wants=0)

    @property
    def _table_maps(self) -> tuple[Tensor, int, int]:
        return self.numbers[:, columns.MAP :], self.table.stride(0), columns.COLUMNS

    @property
    def _settled_maps(self) -> tuple[Tensor, int, int]:
        return self.settled, self.channels * columns.SETTLED, columns.SETTLED

    def _take_waiting(self) -> int:
        """Who is mapped by the pass that is about to run."""
        taken, self.waiting, self.clipped = self.waiting, 0, False
        return taken

    def _asking(self) -> int:
        """Who will ask for moments from here on; those whose voxels stay until then keep the ones of an earlier pass."""
        chain = self.chain
        contrast = CONTRAST if chain.contrast else 0
        inverted = GAMMA_INVERTED if chain.gamma_inverted is not None else 0
        return contrast | inverted | (GAMMA if chain.gamma is not None else 0)

    def _touched(self, changes: int, wants: int) -> int:
        touched = changes | (0 if self.moments_there else wants)
        self.moments_there |= wants != 0
        return touched

    def _need_moments(self, wants: int) -> None:
        if not self.moments_there:
            self._points(0, 0, wants=self._asking() | wants)

    def _points(self, changes: int, mapped: int, wants: int, curved: int = 0) -> None:
        from fasttrain.kernels.intensity_triton import points

        maps, sample_step, channel_step = self.maps
        changes |= mapped | curved
        points[self.grid](
            self.image, self.table, self.numbers, maps, self.settled, self.partial, self.voxels, self.blocks, *self.steps,
            self.table.stride(0), sample_step, channel_step, self._touched(changes, wants), changes, wants, mapped, curved,
            CHANNELS=self.channels, NOISE=changes & NOISE != 0, CURVE=changes & NOISE == 0, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip

    def _blur(self) -> None:
        from fasttrain.kernels.intensity_triton import blur

        radius = self.chain.blur_radius
        axes = [axis for axis in range(_AXES) if self.size[axis] > 1]
        if len(axes) == 1:
            # A pass along an axis of one voxel brings the result back to where it belongs
            axes.insert(0, next(axis for axis in range(_AXES) if self.size[axis] == 1))
        places = [self.image, *(self._spare_image(number) for number in range(len(axes) - 1)), self.image]
        for number, axis in enumerate(axes):
            length = self.size[axis]
            wants = self._asking() if number == len(axes) - 1 else 0
            blur[self.grid](
                places[number], places[number + 1], self.table, self.numbers, self.partial, self.voxels, self.blocks,
                *self.steps, self.table.stride(0), axis, math.prod(self.size[axis + 1 :]), length, radius,
                2 * length * math.ceil(radius / (2 * length)), self._touched(0, wants), wants,
                CHANNELS=self.channels, WRAPS=radius > length, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip

    def _low_resolution(self) -> None:
        from fasttrain.kernels.intensity_triton import downsample, upsample

        maps, sample_step, channel_step = self.maps
        coarse, mapped = self._spare_image(0), self._take_waiting()
        # From here on contrast asks no more
        wants = self._asking() & ~CONTRAST
        shape = (self.voxels, *self.size, *self.steps, self.table.stride(0), sample_step, channel_step)
        downsample[self.grid](
            self.image, coarse, self.table, maps, *shape, mapped, CHANNELS=self.channels, BLOCK=_BLOCK, num_warps=_WARPS
        )
        upsample[self.grid](
            self.image, coarse, self.table, maps, self.partial, self.voxels, self.blocks, *shape[1:],
            self._touched(LOW_RESOLUTION | mapped, wants), wants, mapped, CHANNELS=self.channels, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip

    def _gamma(self, flag: int, retains: bool) -> None:
        wants = self._asking() & (GAMMA | flag)
        if self.clipped and retains:
            # The moments of what is clipped are not those of the map
            self._points(0, self._take_waiting(), wants)
        self._need_moments(wants)
        self._settle(curves=flag)
        self._points(0, self._take_waiting(), wants if retains else wants & ~flag, curved=flag)
        if retains:
            self._settle(restores=flag)
            self.waiting = flag

    def _settle(self, restores: int = 0, stretches: int = 0, curves: int = 0) -> None:
        from fasttrain.kernels.intensity_settle_triton import settle

        maps, sample_step, channel_step = self.maps
        inverted = curves == GAMMA_INVERTED
        settle[(self.samples * self.channels,)](
            self.table, self.numbers, maps, self.settled, self.partial, self.voxels, self.blocks, self.table.stride(0),
            sample_step, channel_step, int(self.waiting != 0), restores, stretches, int(self.chain.clips), curves,
            columns.POWER_INVERTED if inverted else columns.POWER, -1.0 if inverted else 1.0,
            CHANNELS=self.channels, BLOCK=_BLOCK, BLOCK_K=_BLOCK_SETTLED, num_warps=1,
        )  # fmt: skip
        self.maps = self._settled_maps

    def _spare_image(self, number: int) -> Tensor:
        while len(self._spare) <= number:
            self._spare.append(torch.empty_like(self.image))
        return self._spare[number]
