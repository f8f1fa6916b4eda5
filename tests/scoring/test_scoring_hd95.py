"""HD95 is in mm, equals MONAI's on the whole volume, and a missed or invented structure costs the diagonal."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_hausdorff_distance
from torch import Tensor

from fasttrain.scoring import score_case, summarise
from fasttrain.scoring.hd95 import hd95_mm, volume_diagonal_mm


def box(shape: tuple[int, ...], *ranges: tuple[int, int]) -> Tensor:
    volume = torch.zeros(shape, dtype=torch.uint8)
    volume[tuple(slice(*r) for r in ranges)] = 1
    return volume


def test_a_cube_shifted_along_the_thick_axis() -> None:
    label = box((20, 20, 20), (5, 10), (5, 10), (5, 10))
    prediction = box((20, 20, 20), (5, 10), (5, 10), (8, 13))
    distance, penalised = hd95_mm(prediction.bool(), label.bool(), (1.0, 1.0, 5.0))
    assert distance == pytest.approx(15.0)
    assert not penalised
    assert hd95_mm(prediction.bool(), label.bool(), (1.0, 5.0, 1.0))[0] == pytest.approx(3.0)
    assert hd95_mm(label.bool(), label.bool(), (1.0, 1.0, 5.0)) == (0.0, False)
    assert hd95_mm(prediction.bool(), label.bool(), (1, 1, 5.0))[0] == pytest.approx(15.0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(12, 9), (9, 8, 7), (6, 1, 5)]),
    density=st.sampled_from([0.02, 0.2, 0.9, 1.0]),
    spacing=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
)
def test_equals_the_value_of_the_whole_volume(
    seed: int, shape: tuple[int, ...], density: float, spacing: tuple[float, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    prediction, label = torch.rand(2, *shape, generator=generator) < density
    prediction[(0,) * len(shape)] = True
    label[(-1,) * len(shape)] = True
    spacing = spacing[: len(shape)]
    whole = compute_hausdorff_distance(
        prediction[None, None], label[None, None], include_background=True, percentile=95, spacing=spacing
    ).item()
    assert hd95_mm(prediction, label, spacing) == (pytest.approx(whole, rel=1e-6), False)


def test_the_diagonal_runs_over_the_extent() -> None:
    assert volume_diagonal_mm((3, 4, 6), (1.0, 1.0, 2.0)) == pytest.approx(13.0)


@pytest.mark.parametrize("swap", [False, True])
def test_missed_and_invented_structures_cost_the_diagonal(swap: bool) -> None:
    organ, nothing = box((3, 4, 6), (0, 2), (1, 3), (2, 4)), box((3, 4, 6), (0, 0))
    pair = (nothing, organ) if swap else (organ, nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case = score_case("case", *pair, 2, (1.0, 1.0, 2.0), hd95=True)
    assert case.classes[0].dice == 0.0
    assert case.classes[0].hd95 == pytest.approx(13.0)
    assert case.classes[0].hd95_penalised


def test_summary_counts_penalties_and_leaves_empty_cases_out() -> None:
    spacing = (1.0, 1.0, 5.0)
    label = box((20, 20, 20), (5, 10), (5, 10), (5, 10))
    shifted = box((20, 20, 20), (5, 10), (5, 10), (8, 13))
    nothing = torch.zeros_like(label)
    cases = [
        score_case("shifted", shifted, label, 3, spacing, hd95=True),
        score_case("missed", nothing, label, 3, spacing, hd95=True),
        score_case("empty", nothing, nothing, 3, spacing, hd95=True),
    ]
    assert cases[2].classes[0].hd95 is None
    assert not cases[2].classes[0].hd95_penalised
    summary = summarise(cases, ["organ", "never"])
    diagonal = math.sqrt(20**2 + 20**2 + 100**2)
    assert summary.hd95_by_class == {"organ": pytest.approx((15 + diagonal) / 2), "never": None}
    assert summary.hd95 == pytest.approx((15 + diagonal) / 2)
    assert summary.hd95_counts == {"organ": 2, "never": 0}
    assert summary.hd95_penalised == {"organ": 1, "never": 0}


def test_hd95_is_left_out_unless_asked_for() -> None:
    organ = box((6, 6), (1, 3), (1, 3))
    case = score_case("case", organ, organ, 2, (1.0, 1.0), hd95=False)
    assert case.classes[0].hd95 is None
    assert summarise([case], ["organ"]).hd95_counts == {"organ": 0}


def test_each_class_is_measured_by_itself() -> None:
    label = box((10, 10), (1, 3), (1, 3)) + 2 * box((10, 10), (6, 8), (6, 8))
    prediction = box((10, 10), (1, 3), (1, 3)) + 2 * box((10, 10), (6, 8), (7, 9))
    case = score_case("case", prediction, label, 3, (1.0, 2.0), hd95=True)
    assert [c.hd95 for c in case.classes] == [0.0, pytest.approx(2.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_scores_are_the_same_on_a_gpu() -> None:
    prediction, label = torch.randint(0, 3, (2, 12, 10, 8), dtype=torch.uint8)
    here = score_case("case", prediction, label, 3, (1.0, 1.0, 2.0), hd95=True)
    assert score_case("case", prediction.cuda(), label.cuda(), 3, (1.0, 1.0, 2.0), hd95=True) == here
