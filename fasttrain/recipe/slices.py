"""Owns `data.slices`: which slices of volumes become the images of a 2D network, and what cannot be meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fasttrain.recipe.network_spec import Fault
from fasttrain.recipe.spec import Int, NoSwitch, Probability, Spec

if TYPE_CHECKING:
    from fasttrain.recipe.recipe import Recipe


class SlicesSpec(Spec):
    """Volumes are read and prepared as a whole, and a 2D network sees their slices.

    `axis`: across which the volume is cut. `axial`, `coronal` and `sagittal` take the axis nearest to the patient's, however the
    files lie; 0, 1 and 2 count the axes after `data.orientation`, or those of the files where that is null. The two axes of
    `patch.size` are the others, in their order. `keep_empty` is the share of the slices without any class that train, drawn
    anew each time a case was gone through; validation and predictions see every slice. `neighbours` slices on both sides are
    further input channels, from the lowest on; at its ends a volume repeats its last slice.

    Cases are split whole, so that slices of one patient never train and validate. A patch comes from the next slice of its
    case, in an order of its own: all of its slices come once before any comes again. `patch.foreground` draws its share of
    patches around a voxel of a class instead, whichever slice that lies in.
    """

    axis: Annotated[Literal["axial", "coronal", "sagittal", 0, 1, 2], NoSwitch] = "axial"
    keep_empty: Probability = 1.0
    neighbours: Annotated[Int, Field(ge=0, le=16)] = 0


def faults_of_slices(recipe: Recipe) -> Iterator[Fault]:
    """What `data.slices` asks of the rest of a recipe."""
    slices = recipe.data.slices
    if slices is None:
        return
    if recipe.dimensions != 2:
        yield (
            ("patch", "size"),
            f"has {recipe.dimensions} values, and with data.slices a patch lies in a slice; give 2, or take data.slices out to "
            "train on volumes",
        )
    if recipe.task == "dose":
        yield ("data", "slices"), "is for labels of classes, and a dose is predicted for volumes; leave it out"
    if recipe.patch.background_above is not None and slices.keep_empty < 1:
        yield (
            ("patch", "background_above"),
            f"takes voxels of any slice, and data.slices.keep_empty: {slices.keep_empty:g} leaves slices out; set it to null, "
            "or keep_empty to 1",
        )
