"""Ignored voxels are in no sum of a loss: they get no gradient whatever their logits are, and the rest is MONAI's and torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.losses import DiceLoss as MonaiDiceLoss
from monai.losses import FocalLoss as MonaiFocalLoss
from monai.losses import GeneralizedDiceLoss as MonaiGeneralizedDiceLoss
from monai.losses import TverskyLoss as MonaiTverskyLoss
from torch import Tensor, nn
from torch.nn import functional as F

from fasttrain.losses import LOSSES, build_loss
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
from fasttrain.samples import IGNORED

SPECS: dict[str, LossSpec] = {
    "dice": DiceLossSpec(kind="dice"),
    "dice_squared": DiceLossSpec(kind="dice", squared=True, batch=False, include_background=True, smooth=0.0),
    "dice_ce": DiceCELossSpec(kind="dice_ce"),
    "dice_ce_background": DiceCELossSpec(kind="dice_ce", include_background=True, batch=False),
    "cross_entropy": CrossEntropyLossSpec(kind="cross_entropy"),
    "dice_focal": DiceFocalLossSpec(kind="dice_focal", alpha=0.25),
    "dice_focal_background": DiceFocalLossSpec(kind="dice_focal", include_background=True),
    "generalised_dice": GeneralisedDiceLossSpec(kind="generalised_dice"),
    "generalised_dice_background": GeneralisedDiceLossSpec(
        kind="generalised_dice", include_background=True, batch=False
    ),
    "tversky": TverskyLossSpec(kind="tversky"),
    "tversky_background": TverskyLossSpec(kind="tversky", include_background=True, smooth=0.0),
    "bce_dice": BCEDiceLossSpec(kind="bce_dice"),
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def make_pair(
    spec: LossSpec, seed: int = 0, shape: tuple[int, ...] = (2, 4, 6, 4), share: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Logits and a label of which a `share` of the voxels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch, *spatial = shape
    channels, classes = (1, 2) if spec.one_channel else (3, 3)
    logits = 3.0 * torch.randn(batch, channels, *spatial, generator=generator)
    label = torch.randint(0, classes, (batch, 1, *spatial), generator=generator, dtype=torch.uint8)
    hidden = torch.rand(label.shape, generator=generator) < share
    return logits, label.masked_fill(hidden, IGNORED)


def value_and_gradient(loss: Callable[..., Tensor], logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, label)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def test_every_loss_is_tried() -> None:
    assert {spec.kind for spec in SPECS.values()} == set(LOSSES) - TASKS["dose"].losses


# --- whatever stands there ------------------------------------------------------------------------------------------------

ANYTHING = st.sampled_from([0.0, -7.5, 40.0, 1e30, -1e30, math.inf, -math.inf, math.nan])


@every
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), share=st.sampled_from([0.02, 0.5, 0.98, 1.0]), anything=ANYTHING, noise=st.booleans()
)
def test_the_logits_of_ignored_voxels_do_not_matter(
    spec: LossSpec, seed: int, share: float, anything: float, noise: bool
) -> None:
    logits, label = make_pair(spec, seed, share=share)
    loss, hidden = build_loss(spec, ignores=True), (label == IGNORED).expand_as(logits)
    other = torch.where(hidden, anything + (torch.randn_like(logits) if noise else 0.0), logits)
    value, gradient = value_and_gradient(loss, logits, label)
    again, other_gradient = value_and_gradient(loss, other, label)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert torch.equal(value, again)
    assert torch.equal(gradient, other_gradient)
    assert not gradient[hidden].any()


@every
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_where_nothing_is_ignored_the_loss_is_the_one_without(spec: LossSpec, seed: int) -> None:
    logits, label = make_pair(spec, seed, share=0.0)
    value, gradient = value_and_gradient(build_loss(spec, ignores=True), logits, label)
    expected, expected_gradient = value_and_gradient(build_loss(spec), logits, label)
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-7, atol=1e-7)


@every
def test_a_patch_of_ignored_voxels_alone_costs_and_teaches_nothing(spec: LossSpec) -> None:
    logits, label = make_pair(spec, share=1.0)
    value, gradient = value_and_gradient(build_loss(spec, ignores=True), logits, label)
    assert value.item() == pytest.approx(0.0, abs=1e-7)
    assert not gradient.any()


@every
def test_leaving_voxels_out_is_cutting_them_off(spec: LossSpec) -> None:
    """A half that is ignored is as if the patch ended before it."""
    logits, label = make_pair(spec, share=0.0)
    short, short_gradient = value_and_gradient(build_loss(spec), logits[..., :2], label[..., :2])
    label[..., 2:] = IGNORED
    value, gradient = value_and_gradient(build_loss(spec, ignores=True), logits, label)
    torch.testing.assert_close(value, short, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient[..., :2], short_gradient, rtol=0, atol=1e-6)
    assert not gradient[..., 2:].any()


@every
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_under_autocast(spec: LossSpec, half: torch.dtype) -> None:
    """Half logits, which may have overflowed where nothing holds them back."""
    logits, label = make_pair(spec)
    hidden = (label == IGNORED).expand_as(logits)
    logits = logits.to(half)
    wild = logits.masked_fill(hidden, torch.inf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(build_loss(spec, ignores=True), wild, label)
    expected, expected_gradient = value_and_gradient(build_loss(spec, ignores=True), logits.float(), label)
    assert value.dtype == torch.float32
    assert gradient.dtype == half
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient.to(half))
    assert not gradient[hidden].any()


@every
def test_heads_meet_a_thinned_label_that_is_ignored_where_the_label_is(spec: LossSpec) -> None:
    loss = build_loss(spec, ignores=True)
    logits, label = make_pair(spec)
    heads = (logits, logits[..., ::2, ::2, ::2].contiguous())
    thinned = label[..., 1::2, 1::2, 1::2]
    assert (thinned == IGNORED).any()
    leaves = tuple(head.clone().requires_grad_() for head in heads)
    value = loss(leaves, label)
    value.backward()
    torch.testing.assert_close(value, (2 * loss(heads[0], label) + loss(heads[1], thinned)) / 3)
    for leaf, seen in zip(leaves, (label, thinned), strict=True):
        assert leaf.grad is not None
        assert not leaf.grad[(seen == IGNORED).expand_as(leaf)].any()
        assert leaf.grad.any()


@every
def test_it_traces_into_one_graph(spec: LossSpec) -> None:
    torch._dynamo.reset()
    loss = build_loss(spec, ignores=True)
    logits, label = make_pair(spec)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(logits, label), loss(logits, label))


@every
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_is_captured_in_a_cuda_graph(spec: LossSpec) -> None:
    """Capture refuses whatever waits for the device; other voxels may be ignored when the graph is replayed."""
    loss = build_loss(spec, ignores=True)
    logits, label = (one.cuda() for one in make_pair(spec))
    leaf = logits.clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss(leaf, label).backward()
    torch.cuda.current_stream().wait_stream(side)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(leaf, label)
        value.backward()
    for seed, share in ((1, 0.6), (2, 0.0), (3, 1.0)):
        other, other_label = make_pair(spec, seed, share=share)
        with torch.no_grad():
            leaf.copy_(other)
            label.copy_(other_label)
        assert leaf.grad is not None
        leaf.grad.zero_()
        graph.replay()
        expected, expected_gradient = value_and_gradient(loss, other, other_label)
        torch.testing.assert_close(value.detach().cpu(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(leaf.grad.cpu(), expected_gradient, rtol=0, atol=1e-5)


@every
def test_without_an_ignore_label_nothing_is_computed_for_it(spec: LossSpec) -> None:
    logits, label = make_pair(spec, share=0.0)
    assert operations(build_loss(spec), logits, label) < operations(build_loss(spec, ignores=True), logits, label)
    assert "ne" not in names(build_loss(spec), logits, label)
    assert "ne" in names(build_loss(spec, ignores=True), logits, label)


def names(loss: nn.Module, logits: Tensor, label: Tensor) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Listening():
        loss(logits, label)
    return seen


def operations(loss: nn.Module, logits: Tensor, label: Tensor) -> int:
    return len(names(loss, logits, label))


# --- MONAI's and torch's, on what is left ---------------------------------------------------------------------------------


def masked(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and one-hot label with zeros at ignored voxels: MONAI's MaskedDiceLoss masks before the softmax, which is none."""
    known = label != IGNORED
    hot = F.one_hot(label[:, 0].long() * known[:, 0], logits.shape[1]).movedim(-1, 1).float()
    return torch.softmax(logits, dim=1) * known, hot * known


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("include_background", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_dice_is_monais_on_masked_maps(batch: bool, include_background: bool, squared: bool) -> None:
    spec = DiceLossSpec(kind="dice", batch=batch, include_background=include_background, squared=squared)
    theirs = MonaiDiceLoss(
        batch=batch, include_background=include_background, squared_pred=squared, smooth_nr=1e-5, smooth_dr=1e-5
    )
    assert_same(spec, lambda logits, label: theirs(*masked(logits, label)))


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("include_background", [False, True])
def test_tversky_and_generalised_dice_are_monais_on_masked_maps(batch: bool, include_background: bool) -> None:
    terms = {"batch": batch, "include_background": include_background}
    tversky = MonaiTverskyLoss(alpha=0.3, beta=0.7, smooth_nr=1e-5, smooth_dr=1e-5, **terms)
    assert_same(TverskyLossSpec(kind="tversky", **terms), lambda x, y: tversky(*masked(x, y)))
    generalised = MonaiGeneralizedDiceLoss(smooth_nr=1e-5, smooth_dr=1e-5, **terms)
    spec = GeneralisedDiceLossSpec(kind="generalised_dice", smooth=1e-5, **terms)
    assert_same(spec, lambda x, y: generalised(*masked(x, y)))


def torch_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label[:, 0].long(), ignore_index=IGNORED)


def test_cross_entropy_is_torchs_ignore_index() -> None:
    assert_same(CrossEntropyLossSpec(kind="cross_entropy"), torch_cross_entropy)


def test_dice_ce_is_the_sum_of_the_two() -> None:
    dice = MonaiDiceLoss(include_background=False, batch=True, smooth_nr=1e-5, smooth_dr=1e-5)
    spec = DiceCELossSpec(kind="dice_ce", dice_weight=0.7, ce_weight=1.3)
    assert_same(spec, lambda x, y: 0.7 * dice(*masked(x, y)) + 1.3 * torch_cross_entropy(x, y))


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_the_focal_part_is_monais_mean_over_the_voxels_left(alpha: float | None) -> None:
    theirs = MonaiFocalLoss(include_background=False, gamma=2.0, alpha=alpha, reduction="none")

    def focal(logits: Tensor, label: Tensor) -> Tensor:
        known = label != IGNORED
        voxels = theirs(logits, masked(logits, label)[1])
        return (voxels * known).sum() / (known.sum() * voxels.shape[1])

    spec = DiceFocalLossSpec(kind="dice_focal", dice_weight=0.0, gamma=2.0, alpha=alpha)
    assert_same(spec, focal)


def test_bce_dice_is_monais_dice_and_torchs_bce_on_the_voxels_left() -> None:
    dice = MonaiDiceLoss(batch=True, smooth_nr=1e-5, smooth_dr=1e-5)

    def both(logits: Tensor, label: Tensor) -> Tensor:
        known = label != IGNORED
        target = (label == 1).float()
        cross_entropy = F.binary_cross_entropy_with_logits(logits[known], target[known])
        return dice(torch.sigmoid(logits) * known, target) + cross_entropy

    assert_same(SPECS["bce_dice"], both)


def assert_same(spec: LossSpec, theirs: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits, label = make_pair(spec)
    value, gradient = value_and_gradient(build_loss(spec, ignores=True), logits, label)
    expected, expected_gradient = value_and_gradient(theirs, logits, label)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
    background, _ = value_and_gradient(build_loss(spec), logits, label.where(label != IGNORED, 0))
    assert (value - background).abs() > 1e-3, "the control: with those voxels as background it is another number"


# --- by hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # p = 0.5 everywhere, half of n voxels foreground: overlap n/4, predicted n/2, label n/2: 1 − 2·(n/4)/(n/2 + n/2)
        (DiceLossSpec(kind="dice"), 0.5),
        (DiceLossSpec(kind="dice", batch=False, smooth=0.0), 0.5),
        (DiceLossSpec(kind="dice", include_background=True), 0.5),
        # the square of 0.5 halves what is predicted: 1 − 2·(n/4)/(n/4 + n/2)
        (DiceLossSpec(kind="dice", squared=True), 1 / 3),
        (BCEDiceLossSpec(kind="bce_dice", bce_weight=0.0), 0.5),
        (GeneralisedDiceLossSpec(kind="generalised_dice"), 0.5),
        # n/4 found, invented and missed each: 1 − 1/(1 + alpha + beta)
        (TverskyLossSpec(kind="tversky"), 0.5),
        (DiceCELossSpec(kind="dice_ce"), 0.5 + math.log(2)),
    ],
)
@pytest.mark.parametrize("ignores", [False, True])
def test_zero_logits_on_a_label_that_is_half_foreground(spec: LossSpec, expected: float, ignores: bool) -> None:
    label = torch.zeros(2, 1, 16, 16, 16, dtype=torch.uint8)
    label[..., :8] = 1
    if ignores:
        # A quarter of either half is left out, and the halves stay halves
        label[:, :, :4] = IGNORED
    logits = torch.zeros(2, 1 if spec.one_channel else 2, 16, 16, 16)
    assert build_loss(spec, ignores)(logits, label).item() == pytest.approx(expected, abs=1e-6)
