"""Each kernel computes what its plain torch form computes: on a GPU, or where Triton's interpreter is switched on, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.kernels import blocks, few_channels, norm
from fasttrain.kernels.norm import After, Over
from fasttrain.kernels.rows import INTERPRETED, channels_last

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
FLOORS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Differences that need no explanation: a few units in the last place of the type."""


def skip_where_the_interpreter_is_wrong(dtype: torch.dtype) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices as whole numbers")


@pytest.fixture(autouse=True)
def exact_float32() -> Any:
    """Without TF32, so that float32 is compared as float32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def results(compute: Callable[..., Tensor], *inputs: Tensor | None) -> list[Tensor]:
    """What `compute` gives, and the gradients of its inputs."""
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in inputs]
    y = compute(*leaves)
    generator = torch.Generator().manual_seed(1)
    # About 0.5 and not about 0, so that sums over all voxels are no remains of what cancels
    wave = (torch.randn(y.shape, generator=generator) + 0.5).to(y.device, y.dtype)
    # A slice of channels, as a skip connection's gradient is
    torch.cat([y, y.detach()], 1).backward(torch.cat([wave, wave], 1))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    x = torch.randn(shape, device=DEVICE) * 3 + offset
    return x.to(dtype).contiguous(memory_format=channels_last(x))


def compare(kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor | None) -> None:
    """The kernel is no farther from the plain form in float64 than half as far again as the plain form in its own type."""
    found, peer = results(kernel, *inputs), results(plain, *inputs)
    exact = results(plain, *(None if one is None else one.double() for one in inputs))
    assert len(found) == len(peer) == len(exact)
    for one, other, true in zip(found, peer, exact, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = true.norm().clamp_min(1e-2 * true.numel() ** 0.5)
        theirs, ours = (other.double() - true).norm() / scale, (one.double() - true).norm() / scale
        floor = FLOORS[inputs[0].dtype]  # type: ignore[union-attr]
        # A single number is what is left of a sum of thousands of either sign
        assert ours <= max(1.5 * theirs.item(), floor if true.numel() > 1 else 20 * floor)


SHAPES = [(2, 8, 3, 5, 4), (3, 6, 7, 5), (1, 130, 2, 3, 2), (2, 2, 17, 9, 5), (2, 32, 12, 9, 10)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("images", [True, False])
def test_norm_of_every_shape(shape: tuple[int, ...], images: bool) -> None:
    torch.manual_seed(0)
    inputs = (
        laid_out(shape, torch.float32, 5.0),
        torch.rand(shape[1], device=DEVICE),
        torch.randn(shape[1], device=DEVICE),
    )
    compare(
        lambda x, w, b: norm.normalise(x, w, b, Over(images), After(0.01)),
        lambda x, w, b: norm.plain(x, w, b, Over(images), After(0.01)),
        *inputs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("added", ["no", "before", "after"])
@pytest.mark.parametrize("activation", ["none", "leaky", "learnt"])
def test_norm(dtype: torch.dtype, images: bool, weighted: bool, added: Any, activation: str) -> None:
    if added == "before" and activation == "learnt":
        pytest.skip("no network adds before a PReLU")
    shape = (3, 24, 7, 6, 5)
    torch.manual_seed(0)
    x, channels = laid_out(shape, dtype, 5.0), shape[1]
    weight, bias = (torch.rand(channels, device=DEVICE) + 0.5, torch.randn(channels, device=DEVICE))
    inputs = (
        x,
        weight if weighted else None,
        bias if weighted else None,
        laid_out(shape, dtype) if added != "no" else None,
        torch.tensor([0.25], device=DEVICE) if activation == "learnt" else None,
    )
    after = After(0.01 if activation == "leaky" else None, 0.0, added)
    compare(
        lambda x, w, b, a, s, after=after: norm.normalise(x, w, b, Over(images), after, a, s),
        lambda x, w, b, a, s, after=after: norm.plain(x, w, b, Over(images), after, a, s),
        *inputs,
    )


@pytest.mark.parametrize("dtype", list(FLOORS))
def test_running_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = laid_out((3, 24, 5, 6, 7), dtype, 5.0)
    kept = [(torch.ones(24, device=DEVICE), torch.full((24,), 2.0, device=DEVICE)) for _ in range(2)]
    norm.normalise(x, None, None, Over(False), After(), running=kept[0])
    norm.plain(x.float(), None, None, Over(False), After(), running=kept[1])
    for ours, theirs in zip(*kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (32, 8), (64, 4), (8, 8)])
def test_group_norm(channels: int, groups: int) -> None:
    torch.manual_seed(0)
    inputs = (
        laid_out((2, channels, 5, 4, 3), torch.float32, 2.0),
        torch.rand(channels, device=DEVICE),
        torch.randn(channels, device=DEVICE),
    )
    over = Over(True, channels // groups)
    assert norm.usable(inputs[0], over)
    compare(
        lambda x, w, b: norm.normalise(x, w, b, over, After(0.0)),
        lambda x, w, b: norm.plain(x, w, b, over, After(0.0)),
        *inputs,
    )


def test_a_norm_far_from_zero_keeps_its_digits() -> None:
    """Sums of squares would lose a spread of 1 about a mean of 3000 in float32."""
    torch.manual_seed(0)
    x = (torch.randn(2, 8, 16, 16, 16, device=DEVICE) + 3000).contiguous(memory_format=torch.channels_last_3d)
    y = norm.normalise(x, None, None, Over(), After())
    reference = norm.plain(x.double(), None, None, Over(), After())
    assert (y - reference).abs().max() < 5e-3


def test_dropout_keeps_its_share_and_backward_drops_the_same() -> None:
    torch.manual_seed(0)
    x = laid_out((2, 16, 12, 12, 12), torch.float32).requires_grad_()
    y = norm.normalise(x, None, None, Over(False), After(None, 0.2))
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.8) < 0.01
    undropped = norm.plain(x.detach(), None, None, Over(False), After())
    torch.testing.assert_close(y[kept], undropped[kept] / 0.8, rtol=1e-4, atol=1e-4)
    # Σ y · dy must change by y's share along any direction; along x itself a norm does not move, dropped or not
    (gradient,) = torch.autograd.grad(y, x, kept.float() * undropped)
    assert torch.isfinite(gradient).all()
    again = norm.normalise(x.detach(), None, None, Over(False), After(None, 0.2))
    assert ((again != 0) != kept).any()


@pytest.mark.parametrize("dtype", list(FLOORS))
@pytest.mark.parametrize(
    ("shape", "outputs", "kernel"),
    [
        ((2, 8, 3, 4, 5), 6, (2, 2, 2)),
        ((1, 20, 3, 2, 3), 16, (1, 2, 2)),
        ((2, 5, 6, 7), 3, (2, 3)),
        ((2, 320, 2, 2, 2), 320, (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_upsampling_by_blocks(
    dtype: torch.dtype, shape: tuple[int, ...], outputs: int, kernel: tuple[int, ...], biased: bool
) -> None:
    skip_where_the_interpreter_is_wrong(dtype)
    torch.manual_seed(0)
    inputs = (
        laid_out(shape, dtype),
        (torch.randn(shape[1], outputs, *kernel, device=DEVICE) / shape[1] ** 0.5).to(dtype),
        torch.randn(outputs, device=DEVICE).to(dtype) if biased else None,
    )
    compare(blocks.upsample_blocks, blocks.plain, *inputs)


@pytest.mark.parametrize("dtype", list(FLOORS))
@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "stride", "padding"),
    [
        ((2, 1, 7, 8, 9), 8, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ((2, 2, 5, 6, 70), 2, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ((2, 4, 9, 11), 5, (3, 3), (1, 2), (1, 0)),
        ((1, 3, 20, 18, 16), 32, (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ],
)
def test_convolution_of_few_channels(
    dtype: torch.dtype, shape: tuple[int, ...], outputs: int, kernel: tuple[int, ...], stride: Any, padding: Any
) -> None:
    skip_where_the_interpreter_is_wrong(dtype)
    torch.manual_seed(0)
    inputs = (
        laid_out(shape, dtype),
        (torch.randn(outputs, shape[1], *kernel, device=DEVICE) / 5).to(dtype),
        torch.randn(outputs, device=DEVICE).to(dtype),
    )
    compare(
        lambda x, w, b: few_channels.convolve(x, w, b, stride, padding),
        lambda x, w, b: few_channels.plain(x, w, b, stride, padding),
        *inputs,
    )
