"""Heads are weighted 1, 1/2, 1/4 … and meet the label at their own resolution."""

from __future__ import annotations

import pytest
import torch

from fasttrain.losses import build_loss
from fasttrain.losses.deep_supervision import head_weights, shrink_label
from fasttrain.recipe.training_spec import CrossEntropyLossSpec, DiceCELossSpec


def test_weights_halve_and_sum_to_one() -> None:
    assert head_weights(1) == (1.0,)
    assert head_weights(3) == pytest.approx((4 / 7, 2 / 7, 1 / 7))


@pytest.mark.parametrize("shape", [(4, 8, 6), (2, 8, 3), (8, 8, 6), (1, 1, 1)])
def test_shrinking_is_torchs_nearest_exact(shape: tuple[int, ...]) -> None:
    label = torch.randint(0, 5, (2, 1, 8, 8, 6), dtype=torch.uint8)
    small = shrink_label(label, shape)
    assert small.dtype == torch.uint8
    expected = torch.nn.functional.interpolate(label.float(), shape, mode="nearest-exact").to(torch.uint8)
    assert torch.equal(small, expected)


def test_an_odd_step_takes_the_middle_voxel() -> None:
    label = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 9, 1)
    assert shrink_label(label, (3, 1)).flatten().tolist() == [1, 4, 7]


@pytest.mark.parametrize("shape", [(3, 8, 6), (8, 8)])
def test_a_shape_that_does_not_divide_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple"):
        shrink_label(torch.zeros(1, 1, 8, 8, 6, dtype=torch.uint8), shape)


@pytest.mark.parametrize("spec", [DiceCELossSpec(kind="dice_ce"), CrossEntropyLossSpec(kind="cross_entropy")])
def test_the_total_is_the_weighted_sum_of_the_heads(spec: DiceCELossSpec) -> None:
    loss = build_loss(spec)
    label = torch.randint(0, 3, (2, 1, 8, 8, 4), dtype=torch.uint8)
    heads = tuple(torch.randn(2, 3, *shape) for shape in ((8, 8, 4), (8, 4, 2), (4, 2, 1)))
    singles = [loss(head, label[:, :, a // 2 :: a, b // 2 :: b, c // 2 :: c])
               for head, (a, b, c) in zip(heads, ((1, 1, 1), (1, 2, 2), (2, 4, 4)), strict=True)]  # fmt: skip
    expected = (4 * singles[0] + 2 * singles[1] + singles[2]) / 7
    torch.testing.assert_close(loss(heads, label), expected)
    torch.testing.assert_close(loss((heads[0],), label), singles[0])
