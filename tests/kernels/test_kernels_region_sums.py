"""The sums that losses on regions are made of: the kernel's are those of torch's operations, and so is their gradient."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fasttrain.kernels import region_sums
from fasttrain.kernels.rows import INTERPRETED
from fasttrain.losses import build_loss
from fasttrain.recipe.regions import MOST_REGIONS
from fasttrain.recipe.training_spec import LossSpec
from fasttrain.samples import IGNORED

DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = [] if INTERPRETED else [pytest.mark.gpu]
REGIONS = ((1, 2, 3), (2, 3), (3,))
SHAPES = [(2, 3, 5, 7, 6), (1, 3, 33, 40), (3, 1, 4, 4, 4), (2, 17, 6, 5, 4)]


def regions_for(channels: int) -> tuple[tuple[int, ...], ...]:
    return REGIONS if channels == 3 else tuple((1 + number % 3, 4 + number) for number in range(channels))


def made(shape: tuple[int, ...], dtype: torch.dtype, ignores: bool, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    layout = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    logits = (torch.randn(shape, device=device) * 4).to(dtype).contiguous(memory_format=layout)
    label = torch.randint(6, (shape[0], 1, *shape[2:]), device=device, dtype=torch.uint8)
    if ignores:
        label[torch.rand(label.shape, device=device) < 0.3] = IGNORED
    return logits, label, region_sums.region_bits(regions_for(shape[1])).to(device)


def value_and_gradient(compute, logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    value = compute(leaf)
    weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=value.dtype).view(value.shape)
    (value * weights).sum().backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("squared", "gamma", "alpha"), [(True, 2.0, None), (False, 0.0, None), (True, 1.5, 0.25)])
@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_sums_and_gradient(shape, dtype, squared: bool, gamma: float, alpha, ignores: bool, kernels: bool) -> None:
    """The kernels, and their twin in torch's operations, against the same in float64, written another way."""
    logits, label, bits = made(shape, dtype, ignores, DEVICE if kernels else "cpu")
    settings = (label, bits, squared, gamma, alpha, IGNORED if ignores else None)
    assert not kernels or region_sums.usable(logits)
    compute = region_sums.region_sums if kernels else region_sums.plain
    ours = value_and_gradient(lambda x: compute(x, *settings), logits)
    held = [torch.isin(label, torch.tensor(one, device=label.device)) for one in regions_for(shape[1])]

    def by_hand(x: Tensor) -> Tensor:
        known, g = (label != IGNORED).double(), torch.cat(held, 1).double()
        p = torch.sigmoid(x)
        q = p * g + (1 - p) * (1 - g)
        weight = 1.0 if alpha is None else alpha * g + (1 - alpha) * (1 - g)
        maps = (p * g, p**2 if squared else p, g, -weight * (1 - q) ** gamma * q.log())
        return torch.stack([(one * known).flatten(2).sum(2) for one in maps])

    exact = value_and_gradient(by_hand, logits.double())
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=2e-5, atol=2e-5)
    bound = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=bound, atol=bound)
    if ignores:
        assert not ours[1].permute(0, *range(2, ours[1].ndim), 1)[label[:, 0] == IGNORED].any()


def test_a_recipe_has_no_more_regions_than_they_take() -> None:
    assert MOST_REGIONS <= region_sums.MOST_REGIONS
    bits = region_sums.region_bits([(number,) for number in range(region_sums.MOST_REGIONS)])
    assert bits[: region_sums.MOST_REGIONS].tolist() == [1 << number for number in range(region_sums.MOST_REGIONS)]


SPECS = [
    {"kind": "dice_focal", "squared": True},
    {"kind": "dice_focal", "alpha": 0.3, "gamma": 1.0, "batch": False},
    {"kind": "bce_dice"},
    {"kind": "dice"},
    {"kind": "tversky"},
    {"kind": "generalised_dice"},
]


@pytest.mark.parametrize("given", SPECS, ids=lambda given: given["kind"])
@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("_", [pytest.param("kernels", marks=needs_kernels)])
def test_losses_on_sums_are_the_losses(given: dict, ignores: bool, _: str) -> None:
    spec = TypeAdapter(LossSpec).validate_python(given)
    logits, label, _bits = made((2, 3, 6, 8, 10), torch.float32, ignores, DEVICE)
    fused = value_and_gradient(lambda x: build_loss(spec, ignores, True, REGIONS)(x, label), logits)
    usual = value_and_gradient(lambda x: build_loss(spec, ignores, False, REGIONS)(x, label), logits)
    torch.testing.assert_close(fused[0], usual[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused[1], usual[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [-80.0, 80.0])
@pytest.mark.parametrize("_", [pytest.param("kernels", marks=needs_kernels)])
def test_certain_voxels_stay_finite(value: float, _: str) -> None:
    logits, label, bits = made((1, 3, 4, 4, 4), torch.float32, False, DEVICE)
    logits.fill_(value)
    sums, gradient = value_and_gradient(
        lambda x: region_sums.region_sums(x, label, bits, True, 2.0, None, None), logits
    )
    assert sums.isfinite().all()
    assert gradient.isfinite().all()
