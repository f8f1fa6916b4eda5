"""Surface Dice, volumes and bootstrap intervals against values reckoned by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring import bootstrap_intervals, measure_case, score_case
from fasttrain.scoring.surface_dice import surface_dice


def cube(*ranges: tuple[int, int]) -> Tensor:
    volume = torch.zeros((20, 20, 20), dtype=torch.uint8)
    volume[tuple(slice(*r) for r in ranges)] = 1
    return volume


def by_hand(first: Tensor, second: Tensor, spacing: tuple[float, ...], tolerance: float) -> float:
    """The definition, over all pairs of surface voxels: those with a neighbour that is outside."""
    surfaces = []
    for volume in (first, second):
        inside = np.pad(volume.numpy().astype(bool), 1)
        neighbours = [np.roll(inside, step, axis) for axis in range(3) for step in (1, -1)]
        surfaces.append(np.argwhere(inside & ~np.logical_and.reduce(neighbours)) * np.array(spacing))
    distances = np.linalg.norm(surfaces[0][:, None] - surfaces[1][None], axis=2)
    near = (distances.min(1) <= tolerance).sum() + (distances.min(0) <= tolerance).sum()
    return float(near / sum(map(len, surfaces)))


LABEL = cube((5, 10), (5, 10), (5, 10))
SHIFTED = cube((5, 10), (5, 10), (8, 13))


def test_a_shifted_cube_has_its_hd95_volume_and_surface_dice_in_mm() -> None:
    spacing = (1.0, 1.0, 5.0)
    (score,) = score_case("case", SHIFTED, LABEL, 2, spacing, True).classes
    assert score.hd95 == pytest.approx(15.0)
    (measure,) = measure_case(SHIFTED, LABEL, 2, spacing, 1.0)
    assert measure.volume_ml == pytest.approx(125 * 5 / 1000)
    assert measure.error_ml == pytest.approx(0.0)
    assert measure.surface_dice == pytest.approx(by_hand(SHIFTED, LABEL, spacing, 1.0))
    (wide,) = measure_case(SHIFTED, LABEL, 2, spacing, 15.0)
    assert wide.surface_dice == 1.0
    (same,) = measure_case(LABEL, LABEL, 2, spacing, 0.5)
    assert same.surface_dice == 1.0


def test_surface_dice_grows_with_its_tolerance_and_knows_the_axis() -> None:
    shares = [surface_dice(SHIFTED.bool(), LABEL.bool(), (1.0, 1.0, 5.0), mm) for mm in (0.5, 5.0, 10.0, 15.0)]
    expected = [by_hand(SHIFTED, LABEL, (1.0, 1.0, 5.0), mm) for mm in (0.5, 5.0, 10.0, 15.0)]
    assert shares == pytest.approx(expected)
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert surface_dice(SHIFTED.bool(), LABEL.bool(), (1.0, 5.0, 1.0), 3.0) == 1.0


def test_missed_invented_and_absent_structures() -> None:
    empty = torch.zeros_like(LABEL)
    (missed,) = measure_case(empty, LABEL, 2, (1, 1, 1), 1.0)
    (invented,) = measure_case(LABEL, empty, 2, (1, 1, 1), 1.0)
    (absent,) = measure_case(empty, empty, 2, (1, 1, 1), 1.0)
    assert (missed.surface_dice, missed.error_percent) == (0.0, -100.0)
    assert (invented.surface_dice, invented.error_percent) == (0.0, None)
    assert (absent.surface_dice, absent.error_ml) == (None, 0.0)


def test_ignored_voxels_and_planes() -> None:
    label = LABEL.clone()
    label[:, :, 8:] = IGNORED
    (measure,) = measure_case(LABEL, label, 2, (1, 1, 1), 1.0, ignores=True)
    assert measure.volume_ml == measure.predicted_ml == pytest.approx(0.075)
    (plane,) = measure_case(LABEL[7], LABEL[7], 2, (1, 1), 1.0)
    assert (plane.surface_dice, plane.volume_ml, plane.error_ml) == (1.0, None, None)


def test_intervals_are_seeded_hold_the_mean_and_narrow_with_cases() -> None:
    values = np.random.default_rng(3).normal(0.8, 0.1, (40, 2)).tolist()
    headline, classes = bootstrap_intervals(values)
    assert bootstrap_intervals(values) == (headline, classes)
    assert headline is not None
    mean = np.mean(values)
    assert headline.low < mean < headline.high
    # The normal approximation of the same interval
    error = np.std(np.mean(values, axis=1)) / np.sqrt(40)
    assert headline.high - headline.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    fewer, _ = bootstrap_intervals(values[:8])
    assert fewer is not None
    assert fewer.high - fewer.low > headline.high - headline.low


def test_cases_that_do_not_count_are_left_out() -> None:
    headline, classes = bootstrap_intervals([[0.5, None], [0.7, None], [0.9, 0.2]])
    assert classes[0] is not None
    assert 0.5 <= classes[0].low <= classes[0].high <= 0.9
    assert classes[1] is None
    assert headline is not None
    assert bootstrap_intervals([[0.5, 0.5]]) == (None, (None, None))
    assert bootstrap_intervals([[None], [None]]) == (None, (None,))
    assert bootstrap_intervals([]) == (None, ())
