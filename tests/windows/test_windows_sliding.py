"""Sliding windows equal a blend written out by hand, for any shape, flip and batch size."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data.utils import compute_importance_map
from torch import Tensor, nn

from fasttrain.recipe.run_spec import WindowSpec
from fasttrain.windows import count_windows, predict_volume

CPU = torch.device("cpu")


def make_network(dimensions: int, channels: int = 2, classes: int = 3, kernel: int = 3) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
    return convolution(channels, classes, kernel, padding=kernel // 2).eval()


class Spy:
    """A forward that remembers how many patches each call had."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.batches: list[int] = []

    def __call__(self, patches: Tensor) -> Tensor:
        self.batches.append(len(patches))
        return self.network(patches)


def brute_force(
    network: nn.Module, image: Tensor, patch: tuple[int, ...], overlap: float, blend: str, mirror: tuple[int, ...]
) -> Tensor:
    """One window at a time, one flip at a time, on a volume padded on both sides."""
    shape = image.shape[1:]
    gaps = [max(length - size, 0) for length, size in zip(patch, shape, strict=True)]
    padded = torch.zeros(image.shape[0], *(size + gap for size, gap in zip(shape, gaps, strict=True)))
    inner = tuple(slice(gap // 2, gap // 2 + size) for gap, size in zip(gaps, shape, strict=True))
    padded[(slice(None), *inner)] = image
    starts = []
    for size, length in zip(padded.shape[1:], patch, strict=True):
        step = max(int(length * (1 - overlap)), 1)
        axis = list(range(0, size - length, step))
        starts.append([*axis, size - length])
    weights = compute_importance_map(patch, mode=blend)
    total, weight_sum = 0.0, torch.zeros(padded.shape[1:])
    for corner in itertools.product(*starts):
        box = tuple(slice(start, start + length) for start, length in zip(corner, patch, strict=True))
        window = padded[(slice(None), *box)]
        flips = [f for n in range(len(mirror) + 1) for f in itertools.combinations([a + 1 for a in mirror], n)]
        with torch.no_grad():
            parts = [network(window.flip(f)[None]).softmax(1)[0].flip(f) for f in flips]
        probabilities = torch.stack(parts).mean(0)
        if isinstance(total, float):
            total = torch.zeros(len(probabilities), *padded.shape[1:])
        total[(slice(None), *box)] += probabilities * weights
        weight_sum[box] += weights
    return (total / weight_sum)[(slice(None), *inner)]


@pytest.mark.parametrize("mirror", [(), (0,), (0, 1)])
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize(
    ("shape", "patch", "overlap"),
    [
        ((13, 10, 9), (8, 6, 4), 0.25),
        ((13, 5, 9), (8, 8, 8), 0.5),
        ((7, 5, 3), (8, 8, 8), 0.5),
        ((8, 8, 8), (8, 8, 8), 0.25),
        ((20, 11), (8, 8), 0.6),
        ((6, 11), (8, 4), 0.0),
        ((5, 6), (8, 8), 0.0),
    ],
)
def test_equals_the_blend_written_out(
    shape: tuple[int, ...], patch: tuple[int, ...], overlap: float, blend: str, mirror: tuple[int, ...]
) -> None:
    network = make_network(len(patch))
    image = torch.randn(2, *shape)
    for batch_size in (1, 3, 16):
        spec = WindowSpec(overlap=overlap, blend=blend, batch_size=batch_size)
        result = predict_volume(network, image, patch, spec, CPU, mirror)
        assert result.shape == (3, *shape)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, brute_force(network, image, patch, overlap, blend, mirror))


def test_a_pointwise_network_gives_its_softmax_whatever_the_shape() -> None:
    network = make_network(3, kernel=1)
    image = torch.randn(2, 37, 45, 11)
    with torch.no_grad():
        expected = network(image[None]).softmax(1)[0]
    for overlap in (0.0, 0.5):
        result = predict_volume(network, image, (32, 32, 32), WindowSpec(overlap=overlap), CPU, mirror=(0, 1, 2))
        assert result.shape == (3, 37, 45, 11)
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(result.sum(0), torch.ones(37, 45, 11))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    patch=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    batch_size=st.integers(1, 7),
)
def test_shape_and_progress_hold_for_any_volume(
    shape: tuple[int, int], patch: tuple[int, int], overlap: float, batch_size: int
) -> None:
    network, told = make_network(2, kernel=1), []
    spec = WindowSpec(overlap=overlap, batch_size=batch_size)
    image = torch.randn(2, *shape)
    result = predict_volume(network, image, patch, spec, CPU, progress=lambda done, total: told.append((done, total)))
    with torch.no_grad():
        torch.testing.assert_close(result, network(image[None]).softmax(1)[0])
    total = count_windows(shape, patch, overlap)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize(("batch_size", "batches"), [(1, [1] * 8), (3, [3, 3, 2]), (8, [8]), (64, [8])])
def test_the_flips_of_a_single_window_share_a_pass(batch_size: int, batches: list[int]) -> None:
    spy = Spy(make_network(3))
    predict_volume(spy, torch.randn(2, 8, 7, 6), (8, 8, 8), WindowSpec(batch_size=batch_size), CPU, mirror=(0, 1, 2))
    assert spy.batches == batches


def test_no_pass_sees_more_patches_than_the_batch_size() -> None:
    spy = Spy(make_network(3))
    predict_volume(spy, torch.randn(2, 19, 9, 8), (8, 8, 8), WindowSpec(batch_size=4), CPU, mirror=(0, 2))
    assert max(spy.batches) <= 4
    assert sum(spy.batches) == 4 * count_windows((19, 9, 8), (8, 8, 8), 0.25)


def test_a_float16_image_is_summed_in_float32() -> None:
    network = make_network(3)
    image = torch.randn(2, 13, 10, 9).half()
    spec = WindowSpec(overlap=0.5)
    result = predict_volume(network, image, (8, 6, 4), spec, CPU)
    assert result.dtype == torch.float32
    assert torch.equal(result, predict_volume(network, image.float(), (8, 6, 4), spec, CPU))


def test_the_callers_autocast_reaches_the_network() -> None:
    types = []

    def forward(patches: Tensor) -> Tensor:
        logits = network(patches)
        types.append(logits.dtype)
        return logits

    network = make_network(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = predict_volume(forward, torch.randn(2, 13, 8, 8), (8, 8, 8), WindowSpec(), CPU)
    assert set(types) == {torch.bfloat16}
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.sum(0), torch.ones(13, 8, 8))


def test_leaves_the_image_alone_and_keeps_no_graph() -> None:
    network, image = make_network(3), torch.randn(2, 8, 8, 12)
    before = image.clone()
    result = predict_volume(network, image, (8, 8, 8), WindowSpec(), CPU)
    assert torch.equal(image, before)
    assert not result.requires_grad


def test_an_image_with_other_axes_than_the_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="2 axes"):
        predict_volume(make_network(3), torch.randn(2, 8, 8, 8), (8, 8), WindowSpec(), CPU)
