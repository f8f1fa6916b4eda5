"""Losses on regions that overlap: MONAI's with a sigmoid, on the same maps."""

from __future__ import annotations

import pytest
import torch
from monai.losses import DiceFocalLoss, DiceLoss, GeneralizedDiceLoss, TverskyLoss
from pydantic import TypeAdapter
from torch import Tensor, nn

from fasttrain.losses import build_loss, by_kernels
from fasttrain.recipe.training_spec import LossSpec
from fasttrain.samples import IGNORED

REGIONS = ((1, 2, 3), (2, 3), (3,))
SMOOTH = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}


class DiceAndBCE(nn.Module):
    """What nnU-Net trains regions with."""

    def __init__(self, squared: bool) -> None:
        super().__init__()
        self.dice = THEIRS["dice"](squared)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.dice(logits, target) + nn.functional.binary_cross_entropy_with_logits(logits, target)


THEIRS = {
    "dice": lambda squared: DiceLoss(sigmoid=True, batch=True, squared_pred=squared, **SMOOTH),
    "dice_focal": lambda squared: DiceFocalLoss(sigmoid=True, batch=True, squared_pred=squared, gamma=2.0, **SMOOTH),
    "bce_dice": lambda squared: DiceAndBCE(squared),
    "tversky": lambda squared: TverskyLoss(sigmoid=True, batch=True, alpha=0.3, beta=0.7, **SMOOTH),
    "generalised_dice": lambda squared: GeneralizedDiceLoss(sigmoid=True, batch=True, **SMOOTH),
}


def spec_of(kind: str, **more: object):
    smooth = {"smooth": 1e-5} if kind == "generalised_dice" else {}
    return TypeAdapter(LossSpec).validate_python({"kind": kind, **smooth, **more})


def made(shape: tuple[int, ...] = (2, 6, 5, 4)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, *spatial = shape
    logits = 2.0 * torch.randn(batch, 3, *spatial, generator=generator)
    return logits, torch.randint(0, 4, (batch, 1, *spatial), generator=generator, dtype=torch.uint8)


def maps_of(label: Tensor) -> Tensor:
    """As MONAI takes them, made another way than ours."""
    return torch.cat([torch.isin(label, torch.tensor(inside, dtype=torch.uint8)) for inside in REGIONS], 1).float()


def value_and_gradient(loss: nn.Module, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (3, 9, 7)])
def test_they_are_monais(kind: str, squared: bool, shape: tuple[int, ...]) -> None:
    takes = kind not in ("tversky", "generalised_dice")
    logits, label = made(shape)
    loss = build_loss(spec_of(kind, **({"squared": squared} if takes else {})), regions=REGIONS)
    value, gradient = value_and_gradient(loss, logits, label)
    expected, expected_gradient = value_and_gradient(THEIRS[kind](squared), logits, maps_of(label))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    # A negative control: the regions in another order are another loss
    other = build_loss(spec_of(kind), regions=REGIONS[::-1])(logits, label)
    assert abs(float(other) - float(value)) > 1e-3


@pytest.mark.parametrize("kind", THEIRS)
def test_ignored_voxels_have_no_part(kind: str) -> None:
    logits, label = made()
    shortened = build_loss(spec_of(kind), ignores=True, regions=REGIONS)(logits[..., :2], label[..., :2])
    label[..., 2:] = IGNORED
    value, gradient = value_and_gradient(build_loss(spec_of(kind), ignores=True, regions=REGIONS), logits, label)
    torch.testing.assert_close(value, shortened)
    assert not gradient[..., 2:].any()
    assert gradient[..., :2].any()


@pytest.mark.parametrize("kind", THEIRS)
def test_another_number_of_channels_is_refused(kind: str) -> None:
    logits, label = made()
    with pytest.raises(ValueError, match="found 2"):
        build_loss(spec_of(kind), regions=REGIONS)(logits[:, :2], label)


@pytest.mark.parametrize("kind", THEIRS)
def test_half_precision_is_summed_in_float32(kind: str) -> None:
    logits, label = made()
    loss = build_loss(spec_of(kind), regions=REGIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(logits.bfloat16(), label)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(logits.bfloat16().float(), label))


def test_which_losses_have_kernels() -> None:
    assert all(by_kernels(spec_of(kind), regions=True) for kind in THEIRS)
    assert not by_kernels(spec_of("masked_mae"))
    assert [kind for kind in (*THEIRS, "dice_ce", "cross_entropy", "masked_mae") if by_kernels(spec_of(kind))] == [
        "dice",
        "bce_dice",
        "tversky",
        "generalised_dice",
        "dice_ce",
        "cross_entropy",
    ]
