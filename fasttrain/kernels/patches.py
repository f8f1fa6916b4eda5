"""Owns cutting a batch's patches out of volumes in GPU memory, with rotation, scaling and mirroring, in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.kernels.rows import kernels_take

_BLOCK = 512


@dataclass(frozen=True, eq=False)
class Parts:
    """Memory of several processes, in which volumes lie.

    owners: of each case the number of its memory; memories: (images, labels) as in Volumes, None where they are on another GPU;
    image_distances, label_distances: int64 [case], from the first of the own images or labels to the first of the owner's, in
    elements.
    """

    owners: tuple[int, ...]
    memories: tuple[tuple[Tensor, Tensor] | None, ...]
    image_distances: Tensor
    label_distances: Tensor

    def memory_of(self, case: int) -> tuple[Tensor, Tensor]:
        """Raises LookupError where it cannot be seen from here."""
        memory = self.memories[self.owners[case]]
        if memory is None:
            raise LookupError(f"case {case} lies on another GPU")
        return memory


@dataclass(frozen=True, eq=False)
class Volumes:
    """Volumes of several sizes side by side in flat memory on one device.

    images: [voxels · channels], channels last, float16 or float32; labels: [voxels] uint8 or int16. places: int64 [case], the
    voxel that each begins with; lengths: int32 [case, 3] voxels along each axis (a plane has a depth of 1). parts: where some
    lie in memory of other processes, in which their places are then.
    """

    images: Tensor
    labels: Tensor
    places: Tensor
    lengths: Tensor
    channels: int
    parts: Parts | None = None

    @cached_property
    def image_places(self) -> Tensor:
        """int64 [case]: how far from the first of `images` the first value of each lies."""
        own = self.places * self.channels
        return own if self.parts is None else own + self.parts.image_distances

    @cached_property
    def label_places(self) -> Tensor:
        """int64 [case]: how far from the first of `labels` the first label of each lies."""
        return self.places if self.parts is None else self.places + self.parts.label_distances

    def volume(self, case: int) -> tuple[Tensor, Tensor]:
        """image [channel, depth, height, width] and label [1, depth, height, width] of a case, as views; reads the device.

        Raises LookupError for a case on another GPU, which kernels alone can read.
        """
        depth, height, width = self.lengths[case].tolist()
        first = int(self.places[case])
        last = first + depth * height * width
        images, labels = (self.images, self.labels) if self.parts is None else self.parts.memory_of(case)
        image = images[first * self.channels : last * self.channels].view(depth, height, width, self.channels)
        return image.movedim(-1, 0), labels[first:last].view(1, depth, height, width)


def cut(
    volumes: Volumes,
    cases: Tensor,
    corners: Tensor,
    matrices: Tensor,
    size: tuple[int, ...],
    displacement: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """image [sample, channel, *size] float32, channels last, linear interpolation; label [sample, 1, *size], nearest voxel.

    cases: int32 [sample]; corners: int32 [sample, 3], first voxel of each patch, which lies within its volume; matrices: float32
    [sample, 3, 3], an output voxel's offset from the centre to the input's; displacement: [sample, 3, *size] in voxels, added
    before. What lies outside of the patch repeats its edge. `size` has three axes; a plane's first is 1.
    """
    if not kernels_take(volumes.images):
        return plain(volumes, cases, corners, matrices, size, displacement)
    from fasttrain.kernels.patches_triton import cut_patches

    samples, voxels = len(cases), math.prod(size)
    image = torch.empty((samples, *size, volumes.channels), device=cases.device)
    label = torch.empty((samples, 1, *size), device=cases.device, dtype=volumes.labels.dtype)
    cut_patches[math.ceil(voxels / _BLOCK), samples](
        volumes.images, volumes.labels, volumes.image_places, volumes.label_places, volumes.lengths, cases, corners, matrices,
        displacement, image, label, cases.stride(0), corners.stride(0), matrices.stride(0), *size,
        CHANNELS=volumes.channels, BENT=displacement is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return image.movedim(-1, 1), label


def plain(
    volumes: Volumes,
    cases: Tensor,
    corners: Tensor,
    matrices: Tensor,
    size: tuple[int, ...],
    displacement: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by slices and torch's grid_sample, sample by sample."""
    images, labels = [], []
    for row, case in enumerate(cases.tolist()):
        corner = corners[row].tolist()
        box = (slice(None), *(slice(first, first + length) for first, length in zip(corner, size, strict=True)))
        image, label = (one[box].float()[None] for one in volumes.volume(case))
        offsets = [torch.arange(length, device=image.device) - (length - 1) / 2 for length in size]
        away = torch.stack(torch.meshgrid(*offsets, indexing="ij"))
        if displacement is not None:
            away = away + displacement[row]
        # No product of matrices, which a GPU may take in TF32
        at = (matrices[row][:, :, None, None, None] * away).sum(1)
        lengths = torch.tensor(size, device=image.device, dtype=at.dtype)
        grid = (at * (2 / lengths).view(3, 1, 1, 1)).flip(0).movedim(0, -1)[None]
        images.append(functional.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False))
        near = functional.grid_sample(label, grid, mode="nearest", padding_mode="border", align_corners=False)
        labels.append(near.to(volumes.labels.dtype))
    return torch.cat(images).contiguous(memory_format=torch.channels_last_3d), torch.cat(labels)
