"""Sliding windows against a blend written out by hand, and against what must not depend on windows at all."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data.utils import compute_importance_map

from fasttrain.recipe.run_spec import WindowSpec
from fasttrain.windows import predict_volume


def pointwise(windows: torch.Tensor) -> torch.Tensor:
    """A 1×1 convolution: its answer for a voxel depends on that voxel alone, so windows and flips cannot show."""
    return torch.cat([windows[:, :1], -2 * windows[:, :1], windows[:, :1] ** 2], dim=1)


def positional(windows: torch.Tensor) -> torch.Tensor:
    """Depends on where a voxel lies in its window, so that blending shows."""
    ramp = torch.linspace(-1, 1, windows.shape[-1])
    return torch.cat([windows[:, :1] + ramp, windows[:, :1] - ramp], dim=1)


@pytest.mark.parametrize("shape", [(37, 45, 11), (32, 32, 32), (33, 20, 64), (70, 41), (16, 16)])
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize("mirror", [(), (0,), (0, 1)])
def test_a_pointwise_network_gives_its_softmax_whatever_the_windows(
    shape: tuple[int, ...], blend: str, mirror: tuple[int, ...]
) -> None:
    image = torch.randn(2, *shape)
    patch = (32,) * len(shape)
    spec = WindowSpec(overlap=0.5, blend=blend, batch_size=3)
    result = predict_volume(pointwise, image, patch, spec, "cpu", mirror)
    expected = torch.softmax(pointwise(image[None]), dim=1)[0]
    assert result.shape == (3, *shape)
    assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
def test_blending_is_the_weighted_mean_written_out_by_hand(blend: str) -> None:
    image = torch.randn(1, 20, 23)
    patch, overlap = (8, 8), 0.5
    spec = WindowSpec(overlap=overlap, blend=blend, batch_size=2)
    weights = compute_importance_map(patch, mode=blend)
    total, norm = torch.zeros(2, 20, 23), torch.zeros(20, 23)

    def starts(size: int) -> list[int]:
        found = list(range(0, size - 8 + 1, 4))
        return found if found[-1] == size - 8 else [*found, size - 8]

    for row, column in itertools.product(starts(20), starts(23)):
        window = image[None, :, row : row + 8, column : column + 8]
        answer = torch.softmax(positional(window), dim=1)[0]
        total[:, row : row + 8, column : column + 8] += answer * weights
        norm[row : row + 8, column : column + 8] += weights
    result = predict_volume(positional, image, patch, spec, "cpu")
    assert torch.allclose(result, total / norm, atol=1e-5)


def test_mirroring_averages_over_all_flips() -> None:
    image = torch.randn(1, 8, 8)
    spec = WindowSpec(batch_size=4)
    result = predict_volume(positional, image, (8, 8), spec, "cpu", mirror=(0, 1))
    expected = torch.zeros(2, 8, 8)
    for axes in [(), (1,), (2,), (1, 2)]:
        flipped = torch.flip(image, axes) if axes else image
        answer = torch.softmax(positional(flipped[None]), dim=1)[0]
        expected += torch.flip(answer, axes) if axes else answer
    assert torch.allclose(result, expected / 4, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 40)), overlap=st.floats(0, 0.9), batch=st.integers(1, 5))
def test_the_shape_is_kept_and_probabilities_sum_to_one(shape: tuple[int, int], overlap: float, batch: int) -> None:
    seen: list[tuple[int, int]] = []
    spec = WindowSpec(overlap=overlap, batch_size=batch)
    result = predict_volume(
        positional,
        torch.randn(1, *shape),
        (16, 16),
        spec,
        "cpu",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert result.shape == (2, *shape)
    assert torch.allclose(result.sum(0), torch.ones(shape), atol=1e-5)
    assert seen[-1][0] == seen[-1][1]
    assert result.dtype == torch.float32


def test_an_image_of_other_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot slide"):
        predict_volume(pointwise, torch.zeros(1, 8, 8, 8), (8, 8), WindowSpec(), "cpu")
