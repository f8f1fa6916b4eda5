"""HD95 in mm: hand-made distances, penalties, and the crop that must not change a value."""

import math

import pytest
import torch
from monai.metrics import compute_hausdorff_distance

from fasttrain.scoring import score_case, summarise
from fasttrain.scoring.hd95 import hd95_mm


def cube(shape: tuple[int, ...], start: tuple[int, ...], size: int) -> torch.Tensor:
    mask = torch.zeros(shape, dtype=torch.uint8)
    mask[tuple(slice(first, first + size) for first in start)] = 1
    return mask


def test_a_cube_shifted_by_three_voxels_of_5_mm_is_15_mm_away() -> None:
    shape = (20, 20, 20)
    score = score_case("c", cube(shape, (5, 5, 5), 6), cube(shape, (5, 5, 8), 6), 2, (1.0, 1.0, 5.0), True)
    assert score.classes[0].hd95 == pytest.approx(15.0)
    assert not score.classes[0].hd95_penalised


def test_equal_structures_are_0_mm_apart_even_at_the_edge() -> None:
    mask = cube((8, 8, 8), (0, 0, 0), 4)
    assert score_case("c", mask, mask, 2, (2.0, 2.0, 2.0), True).classes[0].hd95 == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_the_crop_to_the_structures_changes_nothing(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prediction, label = (torch.zeros(24, 26, 22, dtype=torch.bool) for _ in range(2))
    for mask in (prediction, label):
        first = torch.randint(1, 10, (3,), generator=generator).tolist()
        last = [start + int(torch.randint(2, 10, (), generator=generator)) for start in first]
        mask[tuple(slice(a, b) for a, b in zip(first, last, strict=True))] = True
        mask &= torch.rand(mask.shape, generator=generator) < 0.8
    spacing = (1.0, 1.5, 3.0)
    whole = compute_hausdorff_distance(
        prediction[None, None], label[None, None], include_background=True, percentile=95, spacing=spacing
    )
    assert hd95_mm(prediction, label, spacing)[0] == pytest.approx(float(whole), abs=1e-5)


def test_missed_and_invented_structures_cost_the_diagonal_and_are_counted() -> None:
    shape, spacing = (10, 20, 5), (1.0, 0.5, 4.0)
    something, nothing = cube(shape, (1, 1, 1), 3), torch.zeros(shape, dtype=torch.uint8)
    diagonal = math.sqrt(10**2 + 10**2 + 20**2)
    scores = [
        score_case("missed", nothing, something, 2, spacing, True),
        score_case("invented", something, nothing, 2, spacing, True),
        score_case("empty", nothing, nothing, 2, spacing, True),
        score_case("right", something, something, 2, spacing, True),
    ]
    assert [score.classes[0].hd95 for score in scores] == [pytest.approx(diagonal), pytest.approx(diagonal), None, 0.0]
    summary = summarise(scores, ["organ"])
    assert summary.hd95 == pytest.approx(2 * diagonal / 3)
    assert summary.hd95_counts == {"organ": 3}
    assert summary.hd95_penalised == {"organ": 2}


def test_in_two_dimensions() -> None:
    score = score_case("c", cube((16, 16), (2, 2), 4), cube((16, 16), (2, 5), 4), 2, (1.0, 2.0), True)
    assert score.classes[0].hd95 == pytest.approx(6.0)


def test_not_asked_for_is_not_computed() -> None:
    mask = cube((8, 8), (1, 1), 3)
    assert score_case("c", mask, mask, 2, (1.0, 1.0), False).classes[0].hd95 is None
