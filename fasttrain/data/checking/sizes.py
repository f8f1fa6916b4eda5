"""Owns what `data.spacing` makes of a volume's size: more than any memory holds, or far more than of the other cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from fasttrain.data.checking.judging import CaseFindings, Terms
from fasttrain.data.volumes import MOST_VOXELS, preprocessed_shape
from fasttrain.errors import RecipeError

_FAR_ABOVE_MEDIAN = 100


def faults_of_size(findings: Sequence[CaseFindings], terms: Terms) -> tuple[dict[str, str], list[str]]:
    """{case name: fault} of cases that no memory could hold once resampled, and a warning for each that is far larger than most.

    Raises RecipeError where all cases are so: then it is not their spacing that is wrong.
    """
    wanted = terms.data.spacing
    voxels = {one.case.name: _voxels(one, terms) for one in findings if one.grid is not None}
    if wanted is None or not voxels:
        return {}, []
    too_large = {name for name, count in voxels.items() if count > MOST_VOXELS}
    target = "×".join(f"{one:g}" for one in wanted)
    if len(too_large) == len(voxels):
        first = next(one for one in findings if one.case.name in too_large)
        raise RecipeError(
            f"data.spacing {list(wanted)} makes {voxels[first.case.name]:.3g} voxels of {first.case.images[0]}; its own spacing "
            f"is {_spacing(first)} mm, and all cases are so: set a coarser data.spacing, or null to keep that of the files"
        )
    usual = median(voxels.values())
    faults, warnings = {}, []
    for one in findings:
        count = voxels.get(one.case.name, 0)
        told = f"a spacing of {_spacing(one)} mm, of which data.spacing {target} makes {count:.3g} voxels"
        if one.case.name in too_large:
            faults[one.case.name] = (
                f"{one.case.images[0]} has {told}, more than any memory holds; mend the spacing in its header, or leave the "
                "case out with data.bad_cases: skip"
            )
        elif count > _FAR_ABOVE_MEDIAN * usual:
            warnings.append(
                f"case {one.case.name}: {one.case.images[0]} has {told}, {count / usual:,.0f} times those of the median case; "
                "if that is a slip, mend the spacing in its header"
            )
    return faults, warnings


def _voxels(case: CaseFindings, terms: Terms) -> int:
    assert case.grid is not None
    grid, data = case.grid, terms.data
    shape = preprocessed_shape(grid.shape, grid.affine, data.spacing, data.orientation, data.sliced_across)
    patch = terms.recipe.box if terms.recipe is not None else shape
    return math.prod(max(pair) for pair in zip(shape, patch, strict=True))


def _spacing(case: CaseFindings) -> str:
    return "×".join(f"{one:.6g}" for one in case.spacing or ())
