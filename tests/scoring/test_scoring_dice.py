"""Dice by the project's rules, against MONAI's numbers and against hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import compute_dice
from monai.networks.utils import one_hot

from fasttrain.scoring import score_case, summarise


def volume(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(1, -1)


def case(prediction: torch.Tensor, label: torch.Tensor, classes: int = 2, hd95: bool = False, name: str = "case"):
    return score_case(name, prediction, label, classes, (1.0,) * label.ndim, hd95)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 5), size=st.integers(2, 9))
def test_dice_is_monais_where_a_class_occurs(seed: int, classes: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, size + 1, 4)
    prediction = torch.randint(0, classes, shape, generator=generator).to(torch.uint8)
    label = torch.randint(0, classes, shape, generator=generator).to(torch.uint8)
    score = case(prediction, label, classes)
    theirs = compute_dice(
        one_hot(prediction[None, None].long(), classes),
        one_hot(label[None, None].long(), classes),
        include_background=True,
    )[0]
    for index, expected in enumerate(theirs.tolist()):
        ours = score.background_dice if index == 0 else score.classes[index - 1].dice
        if math.isnan(expected):  # absent in the label: not counted by MONAI, 0 or not counted by our rule
            assert ours is None or ours == 0
        else:
            assert ours == pytest.approx(expected, abs=1e-6)


def test_absent_in_both_is_not_counted_and_invented_is_zero() -> None:
    nothing, something = volume(0, 0, 0, 0), volume(0, 1, 1, 0)
    assert case(nothing, nothing).classes[0].dice is None
    assert case(something, nothing).classes[0].dice == 0.0
    assert case(nothing, something).classes[0].dice == 0.0
    assert case(something, something).classes[0].dice == 1.0
    assert case(volume(0, 1, 0, 0), something).classes[0].dice == pytest.approx(2 / 3)


def test_the_mean_of_1_0_0_0_0_is_a_fifth() -> None:
    hit, miss = volume(0, 1), volume(1, 0)
    scores = [case(hit, hit), *(case(miss, hit) for _ in range(4))]
    summary = summarise(scores, ["organ"])
    assert summary.dice == pytest.approx(0.2)
    assert summary.dice_counts == {"organ": 5}


def test_the_headline_is_the_mean_over_classes_not_over_voxels_or_cases() -> None:
    both = case(volume(0, 1, 2), volume(0, 1, 2), 3)
    only_first = case(volume(1, 0, 0), volume(0, 1, 0), 3)
    summary = summarise([both, only_first], ["a", "b"])
    assert summary.dice_by_class == {"a": 0.5, "b": 1.0}
    assert summary.dice_counts == {"a": 2, "b": 1}
    assert summary.dice == pytest.approx(0.75)
    assert summary.background_dice is not None


def test_a_class_that_occurs_nowhere_is_left_out_of_the_headline() -> None:
    summary = summarise([case(volume(0, 1), volume(0, 1), 3)], ["a", "b"])
    assert summary.dice == 1.0
    assert summary.dice_by_class["b"] is None
    assert summarise([], ["a"]).dice is None


def test_wrong_shapes_and_indices_are_refused() -> None:
    with pytest.raises(ValueError):
        case(volume(0, 1), volume(0, 1, 1))
    with pytest.raises(ValueError):
        case(volume(0, 2), volume(0, 1))
