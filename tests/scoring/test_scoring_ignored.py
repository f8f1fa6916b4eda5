"""Ignored voxels are scored in no class: Dice and HD95 are those of the voxels that are left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_dice, compute_hausdorff_distance
from torch import Tensor

from fasttrain.samples import IGNORED
from fasttrain.scoring import score_case
from fasttrain.scoring.case_score import CaseScore


def score(prediction: Tensor, label: Tensor, class_count: int = 3, hd95: bool = True) -> CaseScore:
    spacing = (1.0, 2.0, 3.0)[: label.ndim]
    return score_case("case", prediction, label, class_count, spacing, hd95=hd95, ignores=True)


def made(seed: int, shape: tuple[int, ...], classes: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prediction, label = torch.randint(0, classes, (2, *shape), generator=generator, dtype=torch.uint8)
    return prediction, label, torch.rand(shape, generator=generator) < share


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    classes=st.sampled_from([2, 3, 16, 255]),
    shape=st.sampled_from([(7, 6), (6, 5, 4)]),
    share=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
)
def test_dice_is_monais_on_the_voxels_left(seed: int, classes: int, shape: tuple[int, ...], share: float) -> None:
    prediction, label, hidden = made(seed, shape, classes, share)
    ours = score(prediction, label.masked_fill(hidden, IGNORED), classes, hd95=False)
    left = ~hidden
    for index, mine in enumerate([ours.background_dice, *(one.dice for one in ours.classes)]):
        pair = [((volume == index)[left]).float()[None, None] for volume in (prediction, label)]
        if mine is None:
            assert not pair[0].any()
            assert not pair[1].any()
        else:
            assert mine == pytest.approx(compute_dice(*pair, ignore_empty=False).item(), abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_what_is_predicted_there_does_not_matter(seed: int, share: float) -> None:
    prediction, label, hidden = made(seed, (6, 5, 4), 3, share)
    seen = label.masked_fill(hidden, IGNORED)
    other = torch.where(hidden, 2 - prediction, prediction)
    assert score(prediction, seen) == score(other, seen)
    if share == 0.0:
        assert score(prediction, seen) == score_case("case", prediction, label, 3, (1.0, 2.0, 3.0), hd95=True)


def test_hd95_is_monais_with_ignored_voxels_outside_both() -> None:
    prediction, label, hidden = made(5, (9, 8, 7), 3, 0.2)
    ours = score(prediction, label.masked_fill(hidden, IGNORED))
    for index, one in enumerate(ours.classes, start=1):
        pair = [((volume == index) & ~hidden)[None, None] for volume in (prediction, label)]
        theirs = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=(1.0, 2.0, 3.0))
        assert one.hd95 == pytest.approx(theirs.item(), rel=1e-6)


def test_a_structure_that_runs_into_ignored_voxels_ends_at_their_border_in_both() -> None:
    label = torch.zeros(20, 6, dtype=torch.uint8)
    label[4:16, 1:5] = 1
    prediction = label.clone()
    prediction[10:20] = 1  # wrong only where nobody knows
    label[10:] = IGNORED
    assert score(prediction, label).classes[0].dice == 1.0
    assert score(prediction, label).classes[0].hd95 == 0.0


def test_a_structure_that_is_known_nowhere_is_not_counted_and_one_invented_elsewhere_costs() -> None:
    label = torch.zeros(6, 6, dtype=torch.uint8)
    label[:2] = IGNORED
    prediction = torch.zeros_like(label)
    prediction[:2] = 1
    assert (score(prediction, label).classes[0].dice, score(prediction, label).classes[0].hd95) == (None, None)
    prediction[4, 4] = 1
    invented = score(prediction, label).classes[0]
    assert (invented.dice, invented.hd95_penalised) == (0.0, True)


def test_a_volume_of_ignored_voxels_alone_counts_nowhere() -> None:
    label = torch.full((4, 4), IGNORED, dtype=torch.uint8)
    nothing = score(torch.ones_like(label), label)
    assert nothing.background_dice is None
    assert [one.dice for one in nothing.classes] == [None, None]


def test_without_an_ignore_label_255_is_a_fault_or_a_class() -> None:
    label = torch.zeros(4, 4, dtype=torch.uint8)
    label[0] = IGNORED
    with pytest.raises(ValueError, match="4 of the label"):
        score_case("case", label, label, 3, (1.0, 1.0), hd95=False)
    assert score_case("case", label, label, 256, (1.0, 1.0), hd95=False).classes[254].dice == 1.0


def test_other_strange_indices_are_refused_still() -> None:
    label = torch.zeros(4, 4, dtype=torch.uint8)
    label[0], label[1, 1] = IGNORED, 7
    with pytest.raises(ValueError, match="0 voxels of the prediction and 1 of the label"):
        score(torch.zeros_like(label), label)
    with pytest.raises(ValueError, match="differ in shape"):
        score(torch.zeros(4, 5, dtype=torch.uint8), label)


def test_inputs_are_left_alone() -> None:
    prediction, label, hidden = made(0, (5, 4), 3, 0.4)
    label = label.masked_fill(hidden, IGNORED)
    before = prediction.clone(), label.clone()
    score(prediction, label)
    assert torch.equal(prediction, before[0])
    assert torch.equal(label, before[1])
