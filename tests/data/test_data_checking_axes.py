"""The axes of a file as the check sees them, without nibabel where they are no oblique ones: the same as nibabel's."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.data.volumes import axes_along, directions, letters

PERMUTATIONS = st.permutations([0, 1, 2])
SIGNS = st.tuples(*[st.sampled_from([-1.0, 1.0])] * 3)
CODES = [a + b + c for a in "RL" for b in "AP" for c in "SI"]


def affine_of(order: list[int], signs: tuple[float, ...], spacing: tuple[float, ...], tilt: float) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = (np.eye(3)[:, order] + tilt * np.arange(9).reshape(3, 3) / 8) * np.array(signs) * spacing
    return affine


@given(
    PERMUTATIONS,
    SIGNS,
    st.tuples(*[st.floats(0.01, 100.0)] * 3),
    st.sampled_from([0.0, 1e-9, 0.1]),
    st.sampled_from(CODES),
)
def test_axes_are_those_of_nibabel(order, signs, spacing, tilt, codes) -> None:
    affine = affine_of(order, signs, spacing, tilt)
    own = nib.orientations.io_orientation(affine)
    assert np.array_equal(directions(affine), own)
    assert letters(own) == "".join(nib.orientations.ornt2axcodes(own))
    moves = nib.orientations.ornt_transform(own, nib.orientations.axcodes2ornt(codes))
    assert axes_along(affine, 3, codes) == (np.argsort(moves[:, 0]).tolist(), (moves[:, 1] < 0).tolist())


@pytest.mark.parametrize("codes", ["SAR", "ILP", "ASR"])
def test_codes_in_another_order(codes: str) -> None:
    affine = affine_of([2, 0, 1], (1.0, -1.0, -1.0), (1.0, 2.0, 3.0), 0.0)
    moves = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(affine), nib.orientations.axcodes2ornt(codes)
    )
    assert axes_along(affine, 3, codes) == (np.argsort(moves[:, 0]).tolist(), (moves[:, 1] < 0).tolist())
