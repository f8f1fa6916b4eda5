"""Dice equals MONAI's and a count by hand; empty structures follow the project's rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_dice
from monai.networks.utils import one_hot
from torch import Tensor

from fasttrain.scoring import CaseScore, count_case, score_case, score_counts, summarise
from fasttrain.scoring import dice as dice_module
from fasttrain.scoring.dice import dice_of_counts, overlap_counts


def dice_by_class(prediction: Tensor, label: Tensor, class_count: int) -> tuple[float | None, ...]:
    return dice_of_counts(overlap_counts(prediction, label, class_count).tolist())


def dice_of_monai(prediction: Tensor, label: Tensor, class_count: int) -> list[float]:
    maps = [one_hot(volume[None, None].long(), class_count) for volume in (prediction, label)]
    return compute_dice(maps[0], maps[1], include_background=True, ignore_empty=False)[0].tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    class_count=st.sampled_from([2, 3, 5, 15, 16, 40, 256]),
    shape=st.sampled_from([(6, 5), (5, 4, 3), (1, 1, 1)]),
    present=st.integers(1, 256),
)
def test_dice_is_monais(seed: int, class_count: int, shape: tuple[int, ...], present: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prediction, label = torch.randint(0, min(present, class_count), (2, *shape), generator=generator, dtype=torch.uint8)
    ours = dice_by_class(prediction, label, class_count)
    theirs = dice_of_monai(prediction, label, class_count)
    assert len(ours) == class_count
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine is None:
            assert not (prediction == index).any()
            assert not (label == index).any()
        else:
            assert mine == pytest.approx(other, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    class_count=st.sampled_from([2, 3, 15, 16, 255, 256]),
    highest=st.sampled_from([2, 18, 256]),
)
def test_counts_without_a_wait_are_those_of_the_histogram(seed: int, class_count: int, highest: int) -> None:
    """The way of a GPU, which runs on a CPU too; indices beyond the classes among them."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randint(0, highest, (2, 9, 8), generator=generator, dtype=torch.uint8)
    ways = [way(*pair, class_count) for way in (dice_module._by_histogram, dice_module._by_class)]
    assert ways[0].shape == (3, class_count + 1)
    assert torch.equal(*ways)
    assert int(ways[0][1].sum()) == int(ways[0][2].sum()) == 72


def test_counts_read_together_give_the_scores_of_one_by_one() -> None:
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(0, 3, (4, 2, 6, 5, 4), generator=generator, dtype=torch.uint8)
    pairs[1, 1, :2] = 255
    pairs[2] = 0
    for ignores in (False, True):
        chosen = [pair for number, pair in enumerate(pairs) if ignores or number != 1]
        together = torch.stack([count_case(*pair, 3, ignores) for pair in chosen]).tolist()
        for pair, counts in zip(chosen, together, strict=True):
            assert score_counts("case", counts) == score_case("case", *pair, 3, (1.0,) * 3, hd95=False, ignores=ignores)


def test_dice_by_hand() -> None:
    label = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.uint8)
    prediction = torch.tensor([[0, 0, 0, 1], [0, 2, 1, 1]], dtype=torch.uint8)
    assert dice_by_class(prediction, label, 4) == pytest.approx((2 * 3 / (4 + 4), 2 * 3 / (3 + 4), 0.0, None))


def test_inputs_are_left_alone() -> None:
    prediction, label = torch.randint(0, 3, (2, 5, 5), dtype=torch.uint8)
    before = prediction.clone(), label.clone()
    dice_by_class(prediction, label, 3)
    assert torch.equal(prediction, before[0])
    assert torch.equal(label, before[1])


@pytest.mark.parametrize("class_count", [3, 20])
def test_an_index_beyond_the_classes_is_refused(class_count: int) -> None:
    good = torch.zeros(4, 4, dtype=torch.uint8)
    bad = good.clone()
    bad[0, :2] = class_count
    bad[1, 0] = 255
    with pytest.raises(ValueError, match=f"0 voxels of the prediction and 3 of the label .* {class_count} or more"):
        dice_by_class(good, bad, class_count)
    with pytest.raises(ValueError, match="3 voxels of the prediction"):
        dice_by_class(bad, good, class_count)


def test_volumes_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        dice_by_class(torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 5, dtype=torch.uint8), 2)


def half_full(full: bool) -> Tensor:
    volume = torch.zeros(4, 4, 4, dtype=torch.uint8)
    volume[:2] = int(full)
    return volume


def score(prediction: Tensor, label: Tensor, name: str = "case", class_count: int = 2) -> CaseScore:
    return score_case(name, prediction, label, class_count, (1.0, 1.0, 1.0), hd95=False)


def test_five_cases_of_which_one_is_right() -> None:
    right = score(half_full(True), half_full(True))
    missed = score(half_full(False), half_full(True))
    invented = score(half_full(True), half_full(False))
    summary = summarise([right, missed, missed, invented, invented], ["organ"])
    assert summary.dice == pytest.approx(0.2)
    assert summary.dice_by_class == {"organ": pytest.approx(0.2)}
    assert summary.dice_counts == {"organ": 5}


def test_a_case_empty_in_both_is_not_counted() -> None:
    empty = score(half_full(False), half_full(False))
    assert empty.classes[0].dice is None
    right = score(half_full(True), half_full(True))
    summary = summarise([right, empty, empty], ["organ"])
    assert summary.dice == 1.0
    assert summary.dice_counts == {"organ": 1}
    assert summary.cases == 3


def test_the_headline_is_the_mean_over_classes_that_count() -> None:
    label = torch.zeros(4, 4, dtype=torch.uint8)
    label[0], label[1] = 1, 2
    half = label.clone()
    half[1] = torch.tensor([2, 2, 0, 0])
    only_first = torch.where(label == 1, label, 0)
    summary = summarise(
        [score(half, label, class_count=4), score(only_first, only_first, class_count=4)], ["a", "b", "c"]
    )
    assert summary.dice_by_class == {"a": 1.0, "b": pytest.approx(2 / 3), "c": None}
    assert summary.dice_counts == {"a": 2, "b": 1, "c": 0}
    assert summary.dice == pytest.approx((1 + 2 / 3) / 2)
    assert summary.background_dice == pytest.approx((2 * 8 / (10 + 8) + 1) / 2)
    assert summary.hd95 is None


def test_nothing_to_count_gives_none_and_never_nan() -> None:
    for scores in ([], [score(half_full(False), half_full(False))]):
        summary = summarise(scores, ["organ"])
        assert summary.dice is None
        assert summary.dice_by_class == {"organ": None}
        assert summary.dice_counts == {"organ": 0}


def test_a_volume_without_background_does_not_count_it() -> None:
    full = torch.ones(3, 3, dtype=torch.uint8)
    assert score(full, full).background_dice is None


def test_names_and_classes_must_match() -> None:
    with pytest.raises(ValueError, match="case x has 1 classes, 2 are named"):
        summarise([score(half_full(True), half_full(True), name="x")], ["a", "b"])
