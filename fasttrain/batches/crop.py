"""Owns where a training patch is cut from a sample, and the cut."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.recipe.data_spec import PatchSpec
from fasttrain.samples import Sample


def draw_corner(sample: Sample, patch: PatchSpec, generator: torch.Generator) -> tuple[int, ...]:
    """The first voxel of a patch inside the sample, which must be at least patch-sized.

    A share `patch.foreground` of the patches has a foreground voxel at its centre, as near as the volume's edge allows
    (nnU-Net's and MONAI's RandCropByPosNegLabel's way); a sample without foreground gives the other kind. The same number of
    values is drawn in every case.
    """
    spatial = sample.image.shape[1:]
    draws = torch.rand(3 + len(spatial), generator=generator).double().tolist()
    centre = None
    if draws[0] < patch.foreground:
        centre = _pick_foreground(sample.centres, patch.foreground_by, draws[1], draws[2])
    elif sample.background_centres is not None and len(sample.background_centres):
        centre = _at(sample.background_centres, draws[1])
    slack = [length - size for length, size in zip(spatial, patch.size, strict=True)]
    if centre is None:
        return tuple(min(int(draw * (room + 1)), room) for draw, room in zip(draws[3:], slack, strict=True))
    corner = []
    for length, size, room in zip(reversed(spatial), reversed(patch.size), reversed(slack), strict=True):
        centre, place = divmod(centre, length)
        corner.append(min(max(place - size // 2, 0), room))
    return tuple(reversed(corner))


def cut(volume: Tensor, corner: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """A view of `volume` [channel, *spatial], `size` voxels from `corner` on."""
    box = (slice(None), *(slice(first, first + length) for first, length in zip(corner, size, strict=True)))
    return volume[box]


def _pick_foreground(centres: tuple[Tensor, ...], by: str, first: float, second: float) -> int | None:
    present = [table for table in centres if len(table)]
    if not present:
        return None
    if by == "class":
        return _at(present[min(int(first * len(present)), len(present) - 1)], second)
    # Tables hold a share of a large class's voxels, so that a draw over them all is even over classes that fit in whole
    place = min(int(second * sum(len(table) for table in present)), sum(len(table) for table in present) - 1)
    for table in present:
        if place < len(table):
            return int(table[place])
        place -= len(table)
    return None


def _at(table: Tensor, draw: float) -> int:
    return int(table[min(int(draw * len(table)), len(table) - 1)])
