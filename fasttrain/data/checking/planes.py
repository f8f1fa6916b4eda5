"""Owns the refusal of a recipe for plane images on a set of volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttrain.data.checking.facts import FileFacts
from fasttrain.data.checking.judging import Terms
from fasttrain.errors import RecipeError
from fasttrain.samples import Case

_FEWEST_SLICES = 5
"""A last axis this long, of another length than the channels are many, is no axis of channels that were miscounted."""


def refuse_volumes(cases: Sequence[Case], facts: Mapping[Path, FileFacts], terms: Terms) -> None:
    """Raises RecipeError where the recipe is for planes and every image that could be read is a volume.

    Volumes among planes are faults of their cases.
    """
    recipe = terms.recipe
    if recipe is None or terms.dimensions != 2:
        return
    channels = {path: len(terms.data.channels) if len(case.images) == 1 else 1 for case in cases for path in case.images}
    read = [path for path in channels if path in facts and facts[path].decoded]
    if not read or not all(_is_volume(facts[path].shape, channels[path]) for path in read):
        return
    path = min(read)
    shape, size = "×".join(map(str, facts[path].shape)), list(recipe.patch.size)
    are = "all images are volumes" if len(read) > 1 else "the image is a volume"
    raise RecipeError(
        f"patch.size is {size}, for plane images, but {are} ({path} has the shape {shape}); set data.slices.axis=axial, coronal "
        "or sagittal to train on their slices, or give patch.size three values"
    )


def _is_volume(shape: tuple[int, ...], channels: int) -> bool:
    lengths = [length for length in shape if length != 1]
    if len(lengths) < 3 or 1 in shape[:3]:
        return False
    return len(lengths) > 3 or (lengths[2] != channels and lengths[2] >= _FEWEST_SLICES)
