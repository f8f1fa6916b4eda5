"""Owns the `patch` section: which crops of the volumes a network is trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fasttrain.recipe.spec import Float, PositiveInt, Probability, Spec


class PatchSpec(Spec):
    """How crops are drawn for training.

    A share `foreground` of the crops is centred on a foreground voxel, drawn from all of them (`voxel`) or from a class that
    was drawn first (`class`). The others lie anywhere, or are centred on a background voxel whose image value is above
    `background_above`.
    """

    size: Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=3)]
    foreground: Probability = 0.5
    foreground_by: Literal["voxel", "class"] = "voxel"
    background_above: Float | None = None
