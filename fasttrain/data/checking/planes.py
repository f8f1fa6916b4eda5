"""Owns the refusal of a recipe for planes on a set of volumes, and of one that cuts volumes on a set of planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttrain.data.checking.facts import FileFacts
from fasttrain.data.checking.judging import Terms
from fasttrain.errors import RecipeError
from fasttrain.samples import Case

_FEWEST_SLICES = 5
"""A last axis this long, of another length than the channels are many, is no axis of channels that were miscounted."""


def refuse_other_axes(cases: Sequence[Case], facts: Mapping[Path, FileFacts], terms: Terms) -> None:
    """Raises RecipeError where the recipe is for planes and every image that could be read is a volume, or where its
    `data.slices` are to be cut out of planes.

    Where some images are so, that is a fault of their cases.
    """
    recipe = terms.recipe
    if recipe is None or recipe.dimensions != 2:
        return
    channels = {
        path: len(terms.data.channels) if len(case.images) == 1 else 1 for case in cases for path in case.images
    }
    read = [path for path in sorted(channels) if path in facts and facts[path].decoded]
    if not read:
        return
    sliced = recipe.data.slices is not None
    wrong = [path for path in read if _is_volume(facts[path].shape, channels[path]) != sliced]
    if len(wrong) < len(read) or (sliced and any(len(facts[path].shape) > 2 for path in read)):
        return
    shape = "×".join(map(str, facts[read[0]].shape))
    what = "planes" if sliced else "volumes"
    are = f"all images are {what}" if len(read) > 1 else f"the image is a {what[:-1]}"
    found = f"{are} ({read[0]} has the shape {shape})"
    if sliced:
        raise RecipeError(
            f"data.slices cuts volumes, and {found}; set data.slices: null to train on planes as they are"
        )
    raise RecipeError(
        f"patch.size is {list(recipe.patch.size)}, for plane images, but {found}; set data.slices.axis=axial, coronal or "
        "sagittal to train on their slices, or give patch.size three values"
    )


def _is_volume(shape: tuple[int, ...], channels: int) -> bool:
    lengths = [length for length in shape if length != 1]
    if len(lengths) < 3 or 1 in shape[:3]:
        return False
    return len(lengths) > 3 or (lengths[2] != channels and lengths[2] >= _FEWEST_SLICES)
