"""Owns the refusal of a case that preprocessing would make larger than the free memory, by its header and before it is read."""

from __future__ import annotations

import math

from fasttrain.data.grids import spacing_of
from fasttrain.data.volume_files import read_header
from fasttrain.data.volumes import preprocessed_shape
from fasttrain.errors import DataError
from fasttrain.machine.limits import memory_free_bytes
from fasttrain.recipe import Recipe
from fasttrain.samples import Case
from fasttrain.wording import size_in_memory

_ITEM_BYTES = 4
"""Of a voxel and channel as float32, which resampling makes."""


def refuse_beyond_memory(case: Case, recipe: Recipe) -> None:
    """Raises DataError where the resampled image alone takes more than is free: the system would end the whole command for it,
    and a slip in one header would cost all cases after it their predictions. Flat images and files that are not resampled pass.
    """
    data, axes = recipe.data, recipe.volume_dimensions
    if data.spacing is None or axes != 3:
        return
    header = read_header(case.images[0])
    if len(header.shape) < axes:
        return
    shape = preprocessed_shape(header.shape[:axes], header.affine, data.spacing, data.orientation, data.sliced_across)
    need, free = math.prod(shape) * recipe.input_channels * _ITEM_BYTES, memory_free_bytes()
    if need <= free:
        return
    own = "×".join(f"{one:.6g}" for one in spacing_of(header.affine, axes))
    target = "×".join(f"{one:g}" for one in data.spacing)
    raise DataError(
        f"{case.images[0]} has a spacing of {own} mm, of which data.spacing {target} makes {'×'.join(map(str, shape))} voxels: "
        f"{size_in_memory(need)}, and {size_in_memory(free)} are free; mend the spacing in its header, or predict it where there "
        "is more memory"
    )
