"""The sums that losses are made of: the kernel's are those of torch's operations, and so is their gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttrain.kernels import class_sums
from fasttrain.kernels.rows import INTERPRETED
from fasttrain.losses import build_loss
from fasttrain.recipe.training_spec import (
    CrossEntropyLossSpec,
    DiceCELossSpec,
    DiceLossSpec,
    GeneralisedDiceLossSpec,
    TverskyLossSpec,
)
from fasttrain.samples import IGNORED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [(2, 3, 5, 7, 6), (1, 2, 33, 40), (3, 5, 4, 4, 4), (2, 17, 6, 5, 4)]


def made(shape: tuple[int, ...], dtype: torch.dtype, ignores: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    layout = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    logits = (torch.randn(shape, device=DEVICE) * 4).to(dtype).contiguous(memory_format=layout)
    label = torch.randint(shape[1], (shape[0], 1, *shape[2:]), device=DEVICE, dtype=torch.uint8)
    if ignores:
        label[torch.rand(label.shape, device=DEVICE) < 0.3] = IGNORED
    return logits, label


def value_and_gradient(compute, logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    value = compute(leaf)
    weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=value.dtype).view(value.shape)
    (value * weights).sum().backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("ignores", [True, False])
def test_sums_and_gradient(shape: tuple[int, ...], dtype: torch.dtype, squared: bool, ignores: bool) -> None:
    logits, label = made(shape, dtype, ignores)
    ignored = IGNORED if ignores else None
    assert class_sums.usable(logits)
    ours = value_and_gradient(lambda x: class_sums.class_sums(x, label, squared, ignored), logits)
    exact = value_and_gradient(lambda x: class_sums.plain(x, label, squared, ignored), logits.double())
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=2e-5, atol=2e-5)
    bound = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=bound, atol=bound)
    assert ours[1].stride(1) == 1
    if ignores:
        assert not ours[1].permute(0, *range(2, ours[1].ndim), 1)[label[:, 0] == IGNORED].any()


LOSSES = [
    DiceCELossSpec(kind="dice_ce"),
    DiceCELossSpec(kind="dice_ce", squared=True, batch=False, include_background=True),
    DiceLossSpec(kind="dice"),
    GeneralisedDiceLossSpec(kind="generalised_dice"),
    TverskyLossSpec(kind="tversky"),
    CrossEntropyLossSpec(kind="cross_entropy"),
]


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("ignores", [True, False])
def test_losses_on_sums_are_the_losses(spec, ignores: bool) -> None:
    logits, label = made((2, 3, 6, 8, 10), torch.float32, ignores)
    fused = value_and_gradient(lambda x: build_loss(spec, ignores, fused=True)(x, label), logits)
    usual = value_and_gradient(lambda x: build_loss(spec, ignores)(x, label), logits)
    torch.testing.assert_close(fused[0], usual[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused[1], usual[1], rtol=1e-4, atol=1e-7)


def test_a_patch_of_ignored_voxels_alone_costs_nothing() -> None:
    logits, label = made((1, 3, 4, 4, 4), torch.float32, False)
    label.fill_(IGNORED)
    value, gradient = value_and_gradient(
        lambda x: build_loss(DiceCELossSpec(kind="dice_ce"), ignores=True, fused=True)(x, label), logits
    )
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert not gradient.any()
