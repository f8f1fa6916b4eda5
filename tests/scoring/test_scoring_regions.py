"""Scores of regions that overlap: counts by hand, both ways of counting, HD95 of a region as one structure."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_dice

from fasttrain.samples import IGNORED
from fasttrain.scoring import count_case, score_case, score_counts
from fasttrain.scoring import dice as dice_module

BRATS = ((1, 2, 3), (2, 3), (3,))


def dices(*volumes: torch.Tensor, **more: object) -> list[float | None]:
    score = score_case("one", *volumes, 4, (1.0,), False, regions=BRATS, **more)
    assert score == score_counts("one", count_case(*volumes, 4, regions=BRATS, **more).tolist())
    return [one.dice for one in score.classes]


def test_a_count_by_hand() -> None:
    label = torch.tensor([0, 0, 1, 1, 2, 3, 3, 0], dtype=torch.uint8)
    found = torch.tensor([0, 1, 1, 2, 3, 3, 0, 0], dtype=torch.uint8)
    # whole: 5 in the label, 5 found, 4 in both; core: 3, 3, 2; enhancing: 2, 2, 1
    assert dices(found, label) == [8 / 10, 4 / 6, 2 / 4]


def test_a_region_is_met_where_its_classes_are_mixed_up() -> None:
    """The negative control of the one above: 2 in the place of 3 is wrong for the innermost region alone."""
    label = torch.tensor([3, 3, 2, 1], dtype=torch.uint8)
    assert dices(torch.tensor([2, 3, 2, 1], dtype=torch.uint8), label) == [1.0, 1.0, 2 / 3]


def test_a_region_that_is_nowhere_does_not_count_and_an_invented_one_is_0() -> None:
    label = torch.tensor([1, 1, 0, 0], dtype=torch.uint8)
    assert dices(label, label) == [1.0, None, None]
    assert dices(torch.tensor([1, 3, 0, 0], dtype=torch.uint8), label) == [1.0, 0.0, 0.0]


def test_ignored_voxels_count_nowhere() -> None:
    label = torch.tensor([1, 3, IGNORED, IGNORED], dtype=torch.uint8)
    assert dices(torch.tensor([1, 3, 3, 2], dtype=torch.uint8), label, ignores=True) == [1.0, 1.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), highest=st.sampled_from([1, 2, 4]))
def test_both_ways_of_counting_and_monai_agree(seed: int, highest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randint(0, highest, (2, 6, 5, 4), generator=generator, dtype=torch.uint8)
    ways = [way(*pair, 4, BRATS) for way in (dice_module._by_histogram, dice_module._by_class)]
    assert ways[0].shape == (3, 5)
    assert torch.equal(*ways)
    maps = [torch.stack([torch.isin(one, torch.tensor(inside)) for inside in BRATS])[None] for one in pair]
    theirs = compute_dice(*maps, include_background=True, ignore_empty=False)[0].tolist()
    for mine, other in zip(dices(*pair), theirs, strict=True):
        assert mine is None or mine == pytest.approx(other, abs=1e-6)


def test_an_index_that_is_too_large_is_refused() -> None:
    wrong = torch.tensor([4, 0], dtype=torch.uint8)
    with pytest.raises(ValueError, match="class index of 4 or more"):
        score_case("one", wrong, torch.zeros_like(wrong), 4, (1.0,), False, regions=BRATS)


def test_hd95_is_that_of_the_region_as_one_structure() -> None:
    label, found = (torch.zeros(12, 12, 12, dtype=torch.uint8) for _ in range(2))
    label[2:9, 2:9, 2:9], label[4:7, 4:7, 4:7] = 1, 3
    found[2:9, 2:9, 2:9], found[5:8, 4:7, 4:7] = 2, 3
    score = score_case("one", found, label, 4, (2.0, 1.0, 1.0), True, regions=BRATS)
    whole, core, enhancing = score.classes
    # The wholes are one cube, however it is parted; the innermost is off by one voxel of 2 mm
    assert (whole.dice, whole.hd95) == (1.0, 0.0)
    assert enhancing.hd95 == 2.0
    assert (
        core.hd95 == score_case("one", (found > 1).byte(), (label > 1).byte(), 2, (2.0, 1.0, 1.0), True).classes[0].hd95
    )
