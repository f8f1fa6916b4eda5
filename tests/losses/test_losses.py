"""Losses agree with MONAI's in value and gradient, and stay finite and float32."""

from __future__ import annotations

import pytest
import torch
from monai.losses import DiceCELoss as MonaiDiceCELoss
from monai.losses import DiceLoss as MonaiDiceLoss
from torch import Tensor, nn
from torch.nn import functional as F

from fasttrain.losses import build_loss
from fasttrain.losses.membership import float32_scope
from fasttrain.recipe.training_spec import CrossEntropyLossSpec, DiceCELossSpec, DiceLossSpec

SHAPES = {"2d": (3, 9, 7), "3d": (2, 5, 6, 7)}
TERMS = [(b, s, i) for b in (False, True) for s in (False, True) for i in (False, True)]


def make_pair(shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, *spatial = shape
    logits = 3.0 * torch.randn(batch, classes, *spatial, generator=generator)
    label = torch.randint(0, classes, (batch, 1, *spatial), generator=generator, dtype=torch.uint8)
    return logits, label


def value_and_gradient(loss: nn.Module, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, label)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_same(ours: nn.Module, theirs: nn.Module, logits: Tensor, label: Tensor) -> None:
    value, gradient = value_and_gradient(ours, logits, label)
    expected_value, expected_gradient = value_and_gradient(theirs, logits, label)
    assert value.dtype == torch.float32
    assert value.shape == ()
    torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-5)
    scale = expected_gradient.abs().max()
    assert scale > 0
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("batch", "squared", "include_background"), TERMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("smooth", [1e-5, 1.0])
def test_dice_is_monais(
    shape: tuple[int, ...], classes: int, batch: bool, squared: bool, include_background: bool, smooth: float
) -> None:
    spec = DiceLossSpec(kind="dice", batch=batch, squared=squared, include_background=include_background, smooth=smooth)
    theirs = MonaiDiceLoss(
        softmax=True,
        to_onehot_y=True,
        batch=batch,
        squared_pred=squared,
        include_background=include_background,
        smooth_nr=smooth,
        smooth_dr=smooth,
    )
    assert_same(build_loss(spec), theirs, *make_pair(shape, classes))


@pytest.mark.parametrize(("batch", "squared", "include_background"), TERMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dice_ce_is_monais(shape: tuple[int, ...], batch: bool, squared: bool, include_background: bool) -> None:
    spec = DiceCELossSpec(
        kind="dice_ce",
        batch=batch,
        squared=squared,
        include_background=include_background,
        dice_weight=0.7,
        ce_weight=1.3,
    )
    theirs = MonaiDiceCELoss(
        softmax=True,
        to_onehot_y=True,
        batch=batch,
        squared_pred=squared,
        include_background=include_background,
        smooth_nr=1e-5,
        smooth_dr=1e-5,
        lambda_dice=0.7,
        lambda_ce=1.3,
    )
    assert_same(build_loss(spec), theirs, *make_pair(shape, 4))


class TorchCrossEntropy(nn.Module):
    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(logits, label[:, 0].long())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_cross_entropy_is_torchs(shape: tuple[int, ...]) -> None:
    assert_same(build_loss(CrossEntropyLossSpec(kind="cross_entropy")), TorchCrossEntropy(), *make_pair(shape, 3))


@pytest.mark.parametrize(
    "spec", [DiceLossSpec(kind="dice"), DiceCELossSpec(kind="dice_ce"), CrossEntropyLossSpec(kind="cross_entropy")]
)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_logits_of_a_large_patch_are_summed_in_float32(spec: DiceLossSpec, half: torch.dtype) -> None:
    label = torch.zeros(1, 1, 96, 96, 96, dtype=torch.uint8)
    label[..., :48] = 1
    logits = torch.cat([torch.zeros(1, 1, 96, 96, 96), 4.0 * label.float() - 2.0], dim=1).to(half)
    if half == torch.float16:
        assert not torch.isfinite(torch.softmax(logits, dim=1).sum(dtype=half)), "the control must overflow"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(build_loss(spec), logits, label)
    expected, _ = value_and_gradient(build_loss(spec), logits.float(), label)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert gradient.dtype == half
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("smooth", [0.0, 1e-5])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_a_class_absent_in_label_and_prediction_is_finite_and_met(smooth: float, batch: bool, squared: bool) -> None:
    label = torch.zeros(2, 1, 4, 4, 4, dtype=torch.uint8)
    label[:, :, :2] = 1
    logits = 200.0 * F.one_hot(label[:, 0].long(), 3).movedim(-1, 1).float()
    assert not torch.softmax(logits, dim=1)[:, 2].any()
    for spec in (
        DiceLossSpec(kind="dice", smooth=smooth, batch=batch, squared=squared),
        DiceCELossSpec(kind="dice_ce", smooth=smooth, batch=batch, squared=squared),
    ):
        value, gradient = value_and_gradient(build_loss(spec), logits, label)
        assert value.item() == pytest.approx(0.0, abs=1e-6)
        assert torch.isfinite(gradient).all()


def test_an_invented_class_costs() -> None:
    label = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    logits = 20.0 * F.one_hot(torch.ones(1, 4, 4, dtype=torch.long), 2).movedim(-1, 1).float()
    value = build_loss(DiceLossSpec(kind="dice"))(logits, label)
    assert value.item() == pytest.approx(1.0, abs=1e-5)


def test_the_memory_format_does_not_matter() -> None:
    logits, label = make_pair((2, 5, 6, 7), 3)
    loss = build_loss(DiceCELossSpec(kind="dice_ce"))
    value, gradient = value_and_gradient(loss, logits, label)
    other, other_gradient = value_and_gradient(loss, logits.to(memory_format=torch.channels_last_3d), label)
    torch.testing.assert_close(value, other)
    torch.testing.assert_close(gradient, other_gradient)


@pytest.mark.parametrize(
    "spec", [DiceLossSpec(kind="dice", smooth=0.0), DiceCELossSpec(kind="dice_ce")], ids=lambda spec: spec.kind
)
def test_losses_trace_into_one_graph(spec: DiceLossSpec) -> None:
    loss = build_loss(spec)
    traced = torch.compile(loss, backend="eager", fullgraph=True)
    logits, label = make_pair((2, 4, 6, 8), 3)
    heads = (logits, logits[..., ::2, ::2, ::2].contiguous())
    torch.testing.assert_close(traced(heads, label), loss(heads, label))


def test_the_scope_of_a_loss_switches_the_callers_autocast_off() -> None:
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        with float32_scope(matrix):
            assert (matrix @ matrix).dtype == torch.float32
