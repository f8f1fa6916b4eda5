"""Augmentation: batched equals one by one, draws are functions of seed and position, and labels move with images."""

import math

import pytest
import torch

from fasttrain.augment import Augmenter, Chances, Draws
from fasttrain.augment.resample import resample
from fasttrain.augment.rotate import Rotate
from fasttrain.recipe.augment_spec import AugmentSpec, RotateSpec

ALL = {
    "flip": {"probability": 0.5, "axes": [0, 1]},
    "rotate": {"probability": 0.6, "degrees": 30},
    "scale": {"probability": 0.6, "low": 0.7, "high": 1.4},
    "noise": {"probability": 0.6, "std": 0.3},
    "shift_intensity": {"probability": 0.6, "offset": 0.4},
    "scale_intensity": {"probability": 0.6, "low": 0.5, "high": 1.5},
    "gamma": {"probability": 0.6, "low": 0.5, "high": 2.0},
    "elastic": {"probability": 0.6, "magnitude": 0.09},
    "blur": {"probability": 0.6, "channel_probability": 0.5},
    "brightness": {"probability": 0.6, "low": 0.5, "high": 1.5},
    "contrast": {"probability": 0.6, "low": 0.5, "high": 1.5},
    "low_resolution": {"probability": 0.6, "channel_probability": 0.5},
    "gamma_inverted": {"probability": 0.6, "retain_stats": True, "balanced": True},
}
SPECS = [*({name: value} for name, value in ALL.items()), ALL]


def drawn(augmenter: Augmenter, dimensions: int, channels: int, positions: range, seed: int = 0) -> Draws:
    return augmenter.draw(dimensions, channels, Chances(seed, torch.tensor(positions)))


def patches(count: int, shape: tuple[int, ...], channels: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(count, channels, *shape, generator=generator)
    return image, torch.randint(0, 3, (count, 1, *shape), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "+".join(spec) if len(spec) < 3 else "all")
@pytest.mark.parametrize("shape", [(10, 14, 8), (12, 9)])
def test_a_batch_is_its_samples_one_by_one(spec: dict, shape: tuple[int, ...]) -> None:
    augmenter = Augmenter(AugmentSpec.model_validate(spec))
    draws = drawn(augmenter, len(shape), 2, range(12))
    image, label = patches(12, shape)
    together = augmenter.apply(image.clone(), label.clone(), draws)
    changed = 0
    for index in range(12):
        alone = augmenter.apply(
            image[index : index + 1].clone(),
            label[index : index + 1].clone(),
            drawn(augmenter, len(shape), 2, range(index, index + 1)),
        )
        assert torch.equal(alone[0][0], together[0][index])
        assert torch.equal(alone[1][0], together[1][index])
        changed += not torch.equal(alone[0][0], image[index])
    assert changed > 0  # else this gate could not fail


@pytest.mark.parametrize("dimensions", [2, 3])
def test_draws_are_functions_of_seed_and_position(dimensions: int) -> None:
    """Bit for bit, however the samples are batched."""
    augmenter = Augmenter(AugmentSpec.model_validate(ALL))
    whole = drawn(augmenter, dimensions, 2, range(50))
    for start, end in ((0, 1), (5, 6), (3, 20), (49, 50)):
        part = drawn(augmenter, dimensions, 2, range(start, end))
        for name, draw in whole.items():
            for key, value in draw.items():
                assert torch.equal(part[name][key], value[start:end])
    for other in (drawn(augmenter, dimensions, 2, range(1, 51)), drawn(augmenter, dimensions, 2, range(50), seed=1)):
        assert not any(torch.equal(whole[name][key], other[name][key]) for name in whole for key in whole[name])


def test_settings_of_one_technique_do_not_change_the_draws_of_the_next() -> None:
    never = Augmenter(AugmentSpec.model_validate({**ALL, "rotate": {"probability": 0.0}}))
    always = Augmenter(AugmentSpec.model_validate({**ALL, "rotate": {"probability": 1.0}}))
    a, b = drawn(never, 3, 1, range(1)), drawn(always, 3, 1, range(1))
    assert torch.equal(a["noise"]["std"], b["noise"]["std"])
    assert not torch.equal(a["rotate"]["matrix"], b["rotate"]["matrix"])


def test_shares_and_ranges_are_those_of_the_recipe() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate(ALL))
    draws = drawn(augmenter, 3, 2, range(4000))
    for name in ALL.keys() - {"flip"}:
        assert draws[name]["active"].float().mean() == pytest.approx(0.6, abs=0.03)
    assert draws["flip"]["mirrored"].float().mean(0).tolist() == pytest.approx([0.5, 0.5, 0.0], abs=0.03)
    for name, key, low, high in [
        ("noise", "std", 0.0, 0.3),
        ("shift_intensity", "offset", -0.4, 0.4),
        ("scale_intensity", "factor", 0.5, 1.5),
        ("gamma", "power", 0.5, 2.0),
        ("blur", "sigma", 0.5, 1.0),
        ("brightness", "factor", 0.5, 1.5),
        ("contrast", "factor", 0.5, 1.5),
        ("low_resolution", "zoom", 0.5, 1.0),
    ]:
        values = draws[name][key].flatten()
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03 * (high - low))
    magnified = 1 / draws["scale"]["matrix"][draws["scale"]["active"]][:, 0, 0]
    assert magnified.min() >= 0.7
    assert magnified.max() <= 1.4


def test_a_rotation_is_a_rotation() -> None:
    rotate = Rotate(RotateSpec(probability=1.0, degrees=40))
    for matrix in rotate.draw(3, Chances(0, torch.arange(20)))["matrix"].double():
        assert torch.allclose(matrix @ matrix.T, torch.eye(3, dtype=torch.float64), atol=1e-6)
        assert torch.det(matrix) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("shape", [(9, 9, 5), (8, 8, 4)])
def test_a_quarter_turn_is_rot90(shape: tuple[int, ...]) -> None:
    image, label = patches(1, shape, channels=1)
    matrix = torch.eye(3)[None].clone()
    matrix[0, :2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    turned, turned_label = resample(image, label, matrix)
    expected = [torch.rot90(volume, turns, (2, 3)) for volume, turns in ((image, 1), (image, 3))]
    hit = [torch.allclose(turned, one, atol=1e-4) for one in expected]
    assert sum(hit) == 1
    assert torch.equal(turned_label, torch.rot90(label, (1, 3)[hit.index(True)], (2, 3)))


def test_a_turn_is_in_voxels_where_the_patch_is_no_cube() -> None:
    """A ball stays a ball: were the turn in grid_sample's own coordinates, it would become an ellipsoid."""
    shape = (40, 56, 30)
    axes = torch.meshgrid(*(torch.arange(n) - (n - 1) / 2 for n in shape), indexing="ij")
    ball = (sum(axis**2 for axis in axes) < 11**2).float()[None, None]
    angle = math.radians(35)
    matrix = torch.eye(3)[None].clone()
    matrix[0, 0, 0] = matrix[0, 1, 1] = math.cos(angle)
    matrix[0, 0, 1], matrix[0, 1, 0] = -math.sin(angle), math.sin(angle)
    turned, turned_label = resample(ball, ball.to(torch.uint8), matrix)
    assert ((turned > 0.5) != (ball > 0.5)).float().sum() < 0.06 * ball.sum()
    assert (turned_label.float() != ball).float().sum() < 0.06 * ball.sum()


def test_identity_changes_nothing_and_zoom_magnifies() -> None:
    image, label = patches(2, (12, 10, 8))
    same, same_label = resample(image, label, torch.eye(3).repeat(2, 1, 1))
    assert torch.allclose(same, image, atol=1e-4)
    assert torch.equal(same_label, label)
    square = torch.zeros(1, 1, 32, 32)
    square[..., 12:20, 12:20] = 1
    zoomed, zoomed_label = resample(square, square.to(torch.uint8), torch.eye(2)[None] / 2.0)
    assert zoomed_label.sum() == 16 * 16
    assert zoomed.sum() == pytest.approx(16 * 16, rel=0.05)


def test_the_label_follows_the_image() -> None:
    spec = {name: ALL[name] for name in ("flip", "rotate", "scale")}
    augmenter = Augmenter(AugmentSpec.model_validate(spec))
    image = torch.zeros(8, 1, 24, 20, 16)
    image[:, :, 4:14, 6:12, 3:11] = 1.0
    label = (image > 0.5).to(torch.uint8)
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), drawn(augmenter, 3, 1, range(8)))
    agree = ((moved > 0.5) == moved_label.bool()).float().mean()
    assert agree > 0.98
    assert moved_label.dtype == torch.uint8
    assert set(moved_label.unique().tolist()) <= {0, 1}
    assert not torch.equal(moved_label, label)


def test_flips_touch_their_axes_only() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate({"flip": {"probability": 1.0, "axes": [1]}}))
    image, label = patches(3, (6, 5, 4))
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), drawn(augmenter, 3, 2, range(3)))
    assert torch.equal(moved, image.flip(3))
    assert torch.equal(moved_label, label.flip(3))


def test_gamma_keeps_the_range_of_each_channel_and_survives_a_constant_one() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate({"gamma": {"probability": 1.0, "low": 0.5, "high": 2.0}}))
    image, label = patches(4, (8, 8, 8))
    image[0, 0] = 3.0
    moved, _ = augmenter.apply(image.clone(), label, drawn(augmenter, 3, 2, range(4)))
    assert torch.isfinite(moved).all()
    assert torch.allclose(moved[0, 0], image[0, 0])
    assert torch.allclose(moved.amax((2, 3, 4)), image.amax((2, 3, 4)), atol=1e-5)
    assert torch.allclose(moved.amin((2, 3, 4)), image.amin((2, 3, 4)), atol=1e-5)
    assert not torch.allclose(moved, image)


def test_noise_has_the_standard_deviation_it_drew() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate({"noise": {"probability": 1.0, "std": 0.5}}))
    draws = drawn(augmenter, 3, 1, range(6))
    moved, _ = augmenter.apply(torch.zeros(6, 1, 32, 32, 32), torch.zeros(6, 1, 32, 32, 32, dtype=torch.uint8), draws)
    measured = moved.flatten(1).std(1)
    assert torch.allclose(measured, draws["noise"]["std"], rtol=0.03)
    assert moved.flatten(1).mean(1).abs().max() < 0.01
