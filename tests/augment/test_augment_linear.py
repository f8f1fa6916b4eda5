"""The two halves of augmentation for a source that resamples by itself: together they are `apply`."""

import pytest
import torch

from fasttrain.augment import Augmenter, Chances
from fasttrain.augment.resample import Displacement, resample
from fasttrain.recipe.augment_spec import AugmentSpec

MOVES = {
    "flip": {"probability": 0.5},
    "rotate": {"probability": 0.5, "degrees": 30},
    "scale": {"probability": 0.5, "low": 0.7, "high": 1.4},
    "elastic": {"probability": 0.5, "magnitude": 0.1},
}
INTENSITIES = {
    "noise": {"probability": 0.5, "std": 0.3},
    "blur": {"probability": 0.5},
    "gamma": {"probability": 0.5, "retain_stats": True},
}
COUNT = 24


def augmenter_of(names: list[str], dimensions: int) -> Augmenter:
    section = {name: dict({**MOVES, **INTENSITIES}[name]) for name in names}
    if "flip" in section:
        section["flip"]["axes"] = list(range(dimensions))
    return Augmenter(AugmentSpec.model_validate(section))


def patches(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(COUNT, 2, *shape, generator=generator)
    return image, torch.randint(0, 4, (COUNT, 1, *shape), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(10, 14, 9), (12, 9)], ids=["3d", "2d"])
@pytest.mark.parametrize(
    "names",
    [["flip"], ["rotate"], ["elastic"], ["flip", "elastic"], ["rotate", "scale", "flip"], ["noise"],
     ["scale", "flip", "elastic"], [*MOVES, *INTENSITIES]],
    ids="+".join,
)  # fmt: skip
def test_one_resampling_by_linear_and_then_intensity_is_apply(names: list[str], shape: tuple[int, ...]) -> None:
    augmenter = augmenter_of(names, len(shape))
    image, label = patches(shape)
    draws = augmenter.draw(len(shape), 2, Chances(0, torch.arange(COUNT)))
    expected, expected_label = augmenter.apply(image.clone(), label.clone(), draws)
    matrix, displacement = augmenter.linear(draws, COUNT, shape)
    assert matrix.shape == (COUNT, len(shape), len(shape))
    assert matrix.dtype == torch.float32
    moved, moved_label = resample(image, label, matrix, displacement)
    moved = augmenter.apply_intensity(moved, draws)
    assert (moved - expected).abs().max() < 1e-5
    assert (moved_label != expected_label).float().mean() < 1e-4  # halves may be rounded either way
    assert not torch.equal(expected, image)


def test_where_nothing_may_move_the_map_is_the_identity() -> None:
    matrix, displacement = augmenter_of(["noise"], 3).linear({}, 5, (4, 4, 4))
    assert torch.equal(matrix, torch.eye(3).repeat(5, 1, 1))
    assert displacement is None


def test_linear_leaves_the_draws_as_they_were() -> None:
    augmenter = augmenter_of([*MOVES], 3)
    draws, again = (augmenter.draw(3, 1, Chances(0, torch.arange(COUNT))) for _ in range(2))
    first, field = augmenter.linear(draws, COUNT, (8, 9, 10))
    second, other = augmenter.linear(draws, COUNT, (8, 9, 10))
    assert field is not None
    assert other is not None
    assert torch.equal(first, second)
    assert torch.equal(field.field, other.field)
    assert all(torch.equal(draws[name][key], again[name][key]) for name in draws for key in draws[name])


def test_a_mirrored_field_matters() -> None:
    """The negative control: with the field as drawn, or mirrored in space alone, the patch is another."""
    shape = (16, 18, 14)
    augmenter = augmenter_of(["flip", "elastic"], 3)
    image, label = patches(shape)
    draws = augmenter.draw(3, 2, Chances(0, torch.arange(COUNT)))
    expected, _ = augmenter.apply(image.clone(), label.clone(), draws)
    matrix, displacement = augmenter.linear(draws, COUNT, shape)
    assert displacement is not None
    signs = torch.diagonal(matrix, dim1=1, dim2=2)[displacement.rows].reshape(-1, 3, 1, 1, 1)
    wrong, _ = resample(image, label, matrix, Displacement(displacement.rows, displacement.field * signs))
    assert (wrong - expected).abs().max() > 0.1
