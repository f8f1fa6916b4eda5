"""The further losses agree with MONAI's and with numbers worked out by hand, and stay finite in half precision."""

from __future__ import annotations

import math
import typing

import pytest
import torch
from monai.losses import DiceCELoss as MonaiDiceCELoss
from monai.losses import DiceFocalLoss as MonaiDiceFocalLoss
from monai.losses import GeneralizedDiceLoss as MonaiGeneralizedDiceLoss
from monai.losses import TverskyLoss as MonaiTverskyLoss
from torch import Tensor, nn

from fasttrain.losses import LOSSES, build_loss
from fasttrain.losses.generalised_dice import class_weights
from fasttrain.recipe.task import TASKS
from fasttrain.recipe.training_spec import (
    BCEDiceLossSpec,
    CrossEntropyLossSpec,
    DiceCELossSpec,
    DiceFocalLossSpec,
    DiceLossSpec,
    GeneralisedDiceLossSpec,
    LossSpec,
    TverskyLossSpec,
)

SHAPES = {"2d": (3, 9, 7), "3d": (2, 5, 6, 7)}
SPECS: dict[str, LossSpec] = {
    "dice": DiceLossSpec(kind="dice"),
    "dice_ce": DiceCELossSpec(kind="dice_ce"),
    "cross_entropy": CrossEntropyLossSpec(kind="cross_entropy"),
    "dice_focal": DiceFocalLossSpec(kind="dice_focal", alpha=0.25),
    "generalised_dice": GeneralisedDiceLossSpec(kind="generalised_dice"),
    "tversky": TverskyLossSpec(kind="tversky"),
    "bce_dice": BCEDiceLossSpec(kind="bce_dice"),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
batches = pytest.mark.parametrize("batch", [False, True])
backgrounds = pytest.mark.parametrize("include_background", [False, True])
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def make_pair(shape: tuple[int, ...], classes: int, channels: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, *spatial = shape
    logits = 3.0 * torch.randn(batch, channels or classes, *spatial, generator=generator)
    return logits, torch.randint(0, classes, (batch, 1, *spatial), generator=generator, dtype=torch.uint8)


def value_and_gradient(loss: nn.Module, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, label)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_same(spec: LossSpec, theirs: nn.Module, logits: Tensor, label: Tensor) -> None:
    value, gradient = value_and_gradient(build_loss(spec), logits, label)
    expected_value, expected_gradient = value_and_gradient(theirs, logits, label)
    assert (value.dtype, value.shape) == (torch.float32, ())
    torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-5)
    scale = expected_gradient.abs().max()
    assert scale > 0
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=0, atol=1e-5)


def test_every_loss_of_the_recipe_has_a_class() -> None:
    union, _ = typing.get_args(LossSpec)
    kinds = {typing.get_args(spec.model_fields["kind"].annotation)[0] for spec in typing.get_args(union)}
    of_tasks = frozenset().union(*(task.losses for task in TASKS.values()))
    assert set(LOSSES) == kinds == of_tasks
    assert set(SPECS) == TASKS["segmentation"].losses


@shapes
@batches
@backgrounds
@pytest.mark.parametrize(("gamma", "alpha"), [(2.0, None), (0.0, 0.25), (1.5, 0.75)])
def test_dice_focal_is_monais(
    shape: tuple[int, ...], batch: bool, include_background: bool, gamma: float, alpha: float | None
) -> None:
    spec = DiceFocalLossSpec(
        kind="dice_focal", batch=batch, include_background=include_background, gamma=gamma, alpha=alpha,
        squared=True, dice_weight=0.7, focal_weight=1.3,
    )  # fmt: skip
    theirs = MonaiDiceFocalLoss(
        softmax=True, to_onehot_y=True, batch=batch, include_background=include_background, gamma=gamma, alpha=alpha,
        squared_pred=True, lambda_dice=0.7, lambda_focal=1.3,
    )  # fmt: skip
    assert_same(spec, theirs, *make_pair(shape, 4))


@shapes
@batches
@backgrounds
@pytest.mark.parametrize(("weighting", "theirs"), [("square", "square"), ("volume", "simple"), ("uniform", "uniform")])
@pytest.mark.parametrize("absent", [False, True])
def test_generalised_dice_is_monais(
    shape: tuple[int, ...], batch: bool, include_background: bool, weighting: str, theirs: str, absent: bool
) -> None:
    spec = GeneralisedDiceLossSpec(
        kind="generalised_dice", batch=batch, include_background=include_background, weighting=weighting, smooth=1e-5
    )
    monais = MonaiGeneralizedDiceLoss(
        softmax=True, to_onehot_y=True, batch=batch, include_background=include_background, w_type=theirs
    )
    logits, label = make_pair(shape, 4)
    if absent:
        label[0][label[0] == 3] = 1
        label[label == 2] = 1
    assert_same(spec, monais, logits, label)


@shapes
@batches
@backgrounds
@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.7), (0.5, 0.5), (1.0, 0.0)])
def test_tversky_is_monais(
    shape: tuple[int, ...], batch: bool, include_background: bool, alpha: float, beta: float
) -> None:
    spec = TverskyLossSpec(
        kind="tversky", batch=batch, include_background=include_background, alpha=alpha, beta=beta, smooth=1e-5
    )
    theirs = MonaiTverskyLoss(
        softmax=True, to_onehot_y=True, batch=batch, include_background=include_background, alpha=alpha, beta=beta
    )
    assert_same(spec, theirs, *make_pair(shape, 4))


class OnFloats(nn.Module):
    """MONAI's loss given the label as floats, which it wants where it squares."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        value: Tensor = self.loss(logits, label.float())
        return value


@shapes
@batches
@pytest.mark.parametrize("squared", [False, True])
def test_bce_dice_is_monais(shape: tuple[int, ...], batch: bool, squared: bool) -> None:
    spec = BCEDiceLossSpec(kind="bce_dice", batch=batch, squared=squared, dice_weight=0.7, bce_weight=1.3)
    theirs = MonaiDiceCELoss(sigmoid=True, batch=batch, squared_pred=squared, lambda_dice=0.7, lambda_ce=1.3)
    assert_same(spec, OnFloats(theirs), *make_pair(shape, 2, channels=1))


PROBABILITIES = (0.5, 0.75, 0.5, 0.25)
"""Of class 1, in four voxels of which the first two are of class 1."""


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # found 1.25, sum of probabilities 2, voxels 2
        (DiceLossSpec(kind="dice", smooth=0), 1 - 2.5 / 4),
        (TverskyLossSpec(kind="tversky", smooth=0), 1 - 1.25 / (1.25 + 0.3 * 0.75 + 0.7 * 0.75)),
        (TverskyLossSpec(kind="tversky", smooth=0, alpha=0, beta=1), 1 - 1.25 / 2),
        # one class: its weight cancels
        (GeneralisedDiceLossSpec(kind="generalised_dice"), 1 - 2.5 / 4),
        # with as many voxels in both classes the weights are equal, and so are their overlaps
        (GeneralisedDiceLossSpec(kind="generalised_dice", include_background=True), 1 - 2 * (1.25 + 1.25) / (4 + 4)),
        # logits ±z/2: a class's sigmoid is not its softmax
        (
            DiceFocalLossSpec(kind="dice_focal", dice_weight=0, gamma=1),
            sum(-(1 - p) * math.log(p) for p in (0.5, 3**0.5 / (1 + 3**0.5), 0.5, 3**0.5 / (1 + 3**0.5))) / 4,
        ),
        (
            BCEDiceLossSpec(kind="bce_dice", smooth=0),
            1 - 2.5 / 4 + sum(-math.log(p) for p in (0.5, 0.75, 0.5, 0.75)) / 4,
        ),
    ],
)
def test_by_hand(spec: LossSpec, expected: float) -> None:
    z = torch.logit(torch.tensor(PROBABILITIES)).view(1, 1, 2, 2)
    logits = z if spec.one_channel else torch.cat([-z / 2, z / 2], dim=1)
    label = torch.tensor([1, 1, 0, 0], dtype=torch.uint8).view(1, 1, 2, 2)
    assert build_loss(spec)(logits, label).item() == pytest.approx(expected, abs=1e-6)


def test_generalised_weights_by_hand() -> None:
    voxels = torch.tensor([[4.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    assert class_weights(voxels, "square").tolist() == [[1 / 16, 1 / 4, 1 / 4], [0, 0, 0]]
    assert class_weights(voxels, "volume").tolist() == [[1 / 4, 1 / 2, 1 / 2], [0, 0, 0]]
    assert class_weights(voxels, "uniform").tolist() == [[1, 1, 1], [1, 1, 1]]


def test_tversky_weighs_what_is_invented_by_alpha_and_what_is_missed_by_beta() -> None:
    small, large = torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    small[..., :2, :], large[..., :3, :] = 1, 1
    loss = build_loss(TverskyLossSpec(kind="tversky", alpha=0.1, beta=0.9))

    def answer(label: Tensor) -> Tensor:
        return 40.0 * torch.cat([1.0 - label.float(), label.float()], dim=1)

    missed, invented = loss(answer(small), large), loss(answer(large), small)
    assert missed.item() == pytest.approx(1 - 8 / (8 + 0.9 * 4), abs=1e-5)
    assert invented.item() == pytest.approx(1 - 8 / (8 + 0.1 * 4), abs=1e-5)


@every
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_logits_of_96_cubed_foreground_are_summed_in_float32(spec: LossSpec, half: torch.dtype) -> None:
    """Wrong in one half of the patch and sure of it, right in the other: sums of 884,736, beyond float16."""
    size = 96
    label = torch.ones(1, 1, size, size, size, dtype=torch.uint8)
    z = torch.full((1, 1, size, size, size), 3.0)
    z[..., : size // 2] = -3.0
    logits = (z if spec.one_channel else torch.cat([torch.zeros_like(z), z], dim=1)).to(half)
    if half is torch.float16:
        assert not torch.isfinite(label.sum(dtype=half)), "the control must overflow"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(build_loss(spec), logits, label)
    expected, true_gradient = value_and_gradient(build_loss(spec), logits.float(), label)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert value > 0.1
    assert gradient.dtype == half
    assert torch.isfinite(gradient).all()
    # Gradients of a mean over 884,736 voxels; float16 keeps them to its smallest subnormal
    torch.testing.assert_close(gradient.float(), true_gradient, rtol=1e-2, atol=6e-8)


def test_monais_smoothing_would_hide_a_large_structure() -> None:
    """Why generalised_dice has a smooth of 0 by default: half of 96³ missed, and the loss is near 0."""
    label = torch.ones(1, 1, 96, 96, 96, dtype=torch.uint8)
    logits = torch.zeros(1, 2, 96, 96, 96)
    logits[:, 1], logits[:, 1, :48] = 20.0, -20.0
    smoothed = build_loss(GeneralisedDiceLossSpec(kind="generalised_dice", smooth=1e-5))(logits, label).item()
    assert smoothed < 0.05
    assert build_loss(SPECS["generalised_dice"])(logits, label).item() == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize("smooth", [0.0, 1e-5])
@batches
@pytest.mark.parametrize("kind", ["dice_focal", "generalised_dice", "tversky"])
def test_a_batch_without_foreground_is_finite_and_met(kind: str, batch: bool, smooth: float) -> None:
    label = torch.zeros(2, 1, 4, 4, 4, dtype=torch.uint8)
    logits = torch.zeros(2, 3, 4, 4, 4)
    logits[:, 0], logits[:, 1:] = 200.0, -200.0
    value, gradient = value_and_gradient(
        build_loss(SPECS[kind].model_copy(update={"smooth": smooth, "batch": batch})), logits, label
    )
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(gradient).all()


@every
def test_deep_supervision_wraps_every_loss(spec: LossSpec) -> None:
    loss = build_loss(spec)
    logits, label = make_pair((2, 8, 8, 4), 2, channels=1 if spec.one_channel else 3)
    heads = (logits, logits[..., ::2, ::2, ::2].contiguous())
    expected = (2 * loss(heads[0], label) + loss(heads[1], label[..., 1::2, 1::2, 1::2])) / 3
    torch.testing.assert_close(loss(heads, label), expected)


@every
def test_every_loss_traces_into_one_graph(spec: LossSpec) -> None:
    torch._dynamo.reset()  # it counts the forms of one method over all tests
    loss = build_loss(spec)
    logits, label = make_pair((2, 4, 6, 8), 2, channels=1 if spec.one_channel else 3)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(logits, label), loss(logits, label))


@every
def test_the_wrong_number_of_channels_is_refused(spec: LossSpec) -> None:
    logits, label = make_pair((1, 4, 4), 2, channels=2 if spec.one_channel else 1)
    with pytest.raises(ValueError, match="use dice_ce" if spec.one_channel else "softmax of two channels or more"):
        build_loss(spec)(logits, label)
