"""The geometry of augmentation against exact moves of voxels and against MONAI, and the spread of its draws."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.transforms import Affine, RandAffine, RandGaussianNoise
from scipy import stats

from fasttrain.augment import Augmenter, Chances
from fasttrain.augment.resample import resample
from fasttrain.augment.rotate import Rotate
from fasttrain.augment.scale import Scale
from fasttrain.recipe.augment_spec import AugmentSpec, FlipSpec, RotateSpec, ScaleSpec

PLANES = [(0, 1), (0, 2), (1, 2)]


def quarter_turn(dimensions: int, plane: tuple[int, int]) -> torch.Tensor:
    """Output offset → input offset of one turn by torch.rot90, whose out[i, j] is in[j, n − 1 − i]."""
    matrix = torch.eye(dimensions)
    first, second = plane
    matrix[first, first] = matrix[second, second] = 0.0
    matrix[first, second], matrix[second, first] = 1.0, -1.0
    return matrix[None]


def noise(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(1, 2, *shape, generator=generator)
    return image, torch.randint(0, 4, (1, 1, *shape), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("shape", [(9, 9, 9), (8, 8, 8)], ids=["odd", "even"])
def test_a_quarter_turn_in_each_plane_is_rot90(plane: tuple[int, int], shape: tuple[int, ...]) -> None:
    image, label = noise(shape)
    turned, turned_label = resample(image, label, quarter_turn(3, plane))
    axes = (plane[0] + 2, plane[1] + 2)
    expected, expected_label = torch.rot90(image, 1, axes), torch.rot90(label, 1, axes)
    assert torch.allclose(turned, expected, atol=1e-4)
    assert torch.equal(turned_label, expected_label)


@pytest.mark.parametrize(("shape", "plane"), [((40, 56, 40), (0, 1)), ((40, 56, 40), (1, 2)), ((24, 38), (0, 1))])
def test_a_quarter_turn_of_no_cube_is_rot90_where_both_have_voxels(
    shape: tuple[int, ...], plane: tuple[int, int]
) -> None:
    """The map is in voxels: along the long axis the turned volume repeats its edge, it is not stretched."""
    image, label = noise(shape)
    turned, turned_label = resample(image, label, quarter_turn(len(shape), plane))
    axes = (plane[0] + 2, plane[1] + 2)
    expected, expected_label = torch.rot90(image, 1, axes), torch.rot90(label, 1, axes)
    for made, wanted, close in ((turned, expected, 1e-4), (turned_label, expected_label, 0)):
        inner, outer = list(made.shape), list(wanted.shape)
        for axis in axes:
            common = min(inner[axis], outer[axis])
            made = made.narrow(axis, (inner[axis] - common) // 2, common)
            wanted = wanted.narrow(axis, (outer[axis] - common) // 2, common)
        assert torch.allclose(made.float(), wanted.float(), atol=close)


def test_what_lies_outside_repeats_the_edge_in_image_and_label_alike() -> None:
    image = torch.zeros(1, 1, 8, 20)
    image[..., :1] = image[..., -1:] = 5.0
    turned, turned_label = resample(image, image.to(torch.uint8), quarter_turn(2, (0, 1)))
    assert torch.equal(turned.round().to(torch.uint8), turned_label)


@pytest.mark.parametrize("shape", [(7, 10, 12), (9, 6)])
def test_angle_zero_and_factor_one_are_the_identity(shape: tuple[int, ...]) -> None:
    spec = {"rotate": {"probability": 1.0, "degrees": 0}, "scale": {"probability": 1.0, "low": 1.0, "high": 1.0}}
    augmenter = Augmenter(AugmentSpec.model_validate(spec))
    image, label = noise(shape)
    draws = augmenter.draw(len(shape), 2, Chances(0, torch.arange(1)))
    assert draws["rotate"]["active"].all()
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), draws)
    assert torch.allclose(moved, image, atol=1e-4)
    assert torch.equal(moved_label, label)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(*[st.integers(2, 9)] * 3),
    axes=st.sets(st.integers(0, 2), min_size=1).map(sorted),
    seed=st.integers(0, 99),
)
def test_flips_are_exact_and_on_the_chosen_axes_alone(shape: tuple[int, ...], axes: list[int], seed: int) -> None:
    augmenter = Augmenter(AugmentSpec(flip=FlipSpec(probability=0.5, axes=tuple(axes))))
    image, label = noise(shape)
    draws = augmenter.draw(3, 2, Chances(seed, torch.arange(1)))
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), draws)
    mirrored = [axis + 2 for axis, yes in enumerate(draws["flip"]["mirrored"][0].tolist()) if yes]
    assert {axis - 2 for axis in mirrored} <= set(axes)
    assert torch.equal(moved, image.flip(mirrored) if mirrored else image)
    assert torch.equal(moved_label, label.flip(mirrored) if mirrored else label)


def test_flips_of_several_axes_are_drawn_apart() -> None:
    augmenter = Augmenter(AugmentSpec(flip=FlipSpec(probability=0.5)))
    draws = augmenter.draw(3, 1, Chances(0, torch.arange(2000)))
    counts = np.zeros((2, 2, 2))
    for one in draws["flip"]["mirrored"].int().tolist():
        counts[tuple(one)] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def angle_of(matrix: torch.Tensor) -> float:
    return math.degrees(math.atan2(float(matrix[1, 0]), float(matrix[0, 0])))


def test_angles_and_factors_are_spread_evenly_over_their_range() -> None:
    rotate, scale = (
        Rotate(RotateSpec(probability=1.0, degrees=40)),
        Scale(ScaleSpec(probability=1.0, low=0.7, high=1.4)),
    )
    chances = Chances(0, torch.arange(1500))
    angles = [angle_of(matrix) for matrix in rotate.draw(2, chances)["matrix"]]
    factors = (1 / scale.draw(2, chances)["matrix"][:, 0, 0]).tolist()
    assert stats.kstest(angles, stats.uniform(-40, 80).cdf).pvalue > 1e-3
    assert stats.kstest(factors, stats.uniform(0.7, 0.7).cdf).pvalue > 1e-3
    assert max(map(abs, angles)) <= 40 + 1e-4


def test_in_3d_each_axis_has_an_angle_of_its_own() -> None:
    rotate = Rotate(RotateSpec(probability=1.0, degrees=10))
    matrices = rotate.draw(3, Chances(0, torch.arange(800)))["matrix"]
    for row, column in itertools.permutations(range(3), 2):
        off = matrices[:, row, column]
        assert off.abs().max() <= 2 * math.sin(math.radians(10))
        assert off.std() == pytest.approx(math.radians(10) / math.sqrt(3), rel=0.15)
        assert abs(float(off.mean())) < 0.02


def blobs(shape: tuple[int, ...]) -> torch.Tensor:
    """Smooth, so that two ways of interpolating agree."""
    axes = torch.meshgrid(*(torch.linspace(0, 3, n) for n in shape), indexing="ij")
    return sum(torch.sin((k + 1) * axis + k) for k, axis in enumerate(axes))[None]


def test_a_turn_and_a_zoom_are_those_of_monai() -> None:
    """MONAI's Affine in voxels about the centre, scale after rotation, is the one implementation we can lean on."""
    shape, angle, factor = (24, 30), math.radians(25), 1.2
    image = blobs(shape)
    monai = Affine(rotate_params=angle, scale_params=(1 / factor, 1 / factor), padding_mode="border", image_only=True)(
        image
    )
    cos, sin = math.cos(angle), math.sin(angle)
    candidates = [torch.tensor([[cos, -sign * sin], [sign * sin, cos]])[None] / factor for sign in (1, -1)]
    errors = [
        float((resample(image[None], torch.zeros(1, 1, *shape, dtype=torch.uint8), one)[0][0] - monai).abs().max())
        for one in candidates
    ]
    assert min(errors) < 1e-3
    assert max(errors) > 0.1


def test_the_spread_of_moved_images_is_that_of_monai() -> None:
    degrees, count, shape = 30, 300, (20, 26)
    image = blobs(shape)
    augmenter = Augmenter(AugmentSpec(rotate=RotateSpec(probability=1.0, degrees=degrees)))
    draws = augmenter.draw(2, 1, Chances(0, torch.arange(count)))
    label = torch.zeros(count, 1, *shape, dtype=torch.uint8)
    ours, _ = augmenter.apply(image.repeat(count, 1, 1)[:, None].clone(), label, draws)
    theirs_of = RandAffine(prob=1.0, rotate_range=math.radians(degrees), padding_mode="border")
    theirs_of.set_random_state(0)
    theirs = torch.stack([torch.as_tensor(theirs_of(image)) for _ in range(count)])
    assert torch.allclose(ours.mean(0), theirs.mean(0), atol=0.15)
    assert torch.allclose(ours.std(0), theirs.std(0), atol=0.12)
    assert ours.std(0).max() > 0.5  # there is a spread to compare


def test_the_noise_is_that_of_monai() -> None:
    count, shape = 200, (12, 12, 12)
    augmenter = Augmenter(AugmentSpec.model_validate({"noise": {"probability": 0.4, "std": 0.5}}))
    draws = augmenter.draw(3, 1, Chances(0, torch.arange(count)))
    zeros = torch.zeros(count, 1, *shape)
    ours, _ = augmenter.apply(zeros.clone(), torch.zeros(count, 1, *shape, dtype=torch.uint8), draws)
    theirs_of = RandGaussianNoise(prob=0.4, std=0.5, sample_std=True)
    theirs_of.set_random_state(0)
    theirs = torch.stack([torch.as_tensor(theirs_of(zeros[0])) for _ in range(count)])
    spreads = [noisy.flatten(1).std(1) for noisy in (ours, theirs)]
    assert abs(float((spreads[0] > 0).float().mean() - (spreads[1] > 0).float().mean())) < 0.12
    assert stats.ks_2samp(*(spread[spread > 0].numpy() for spread in spreads)).pvalue > 1e-3
    one = int(draws["noise"]["std"].mul(draws["noise"]["active"]).argmax())
    standard = ours[one].flatten() / draws["noise"]["std"][one]
    assert stats.kstest(standard[:1500].numpy(), "norm").pvalue > 1e-3


def test_each_sample_has_a_noise_field_of_its_own() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate({"noise": {"probability": 1.0, "std": 0.5}}))
    draws = augmenter.draw(3, 1, Chances(0, torch.arange(6)))
    moved, _ = augmenter.apply(torch.zeros(6, 1, 10, 10, 10), torch.zeros(6, 1, 10, 10, 10, dtype=torch.uint8), draws)
    correlations = torch.corrcoef(moved.flatten(1)) - torch.eye(6)
    assert correlations.abs().max() < 0.15


def test_intensities_are_what_their_draws_say() -> None:
    spec = {
        "shift_intensity": {"probability": 1.0, "offset": 0.4},
        "scale_intensity": {"probability": 1.0, "low": 0.5, "high": 1.5},
    }
    augmenter = Augmenter(AugmentSpec.model_validate(spec))
    image, label = noise((6, 5, 4))
    draws = augmenter.draw(3, 2, Chances(3, torch.arange(1)))
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), draws)
    shape = (1, 2, 1, 1, 1)
    expected = (image + draws["shift_intensity"]["offset"].view(shape)) * draws["scale_intensity"]["factor"].view(shape)
    assert torch.allclose(moved, expected)
    assert torch.equal(moved_label, label)
    # A channel has a draw of its own
    assert draws["shift_intensity"]["offset"][0, 0] != draws["shift_intensity"]["offset"][0, 1]


def test_gamma_is_the_power_of_the_range() -> None:
    augmenter = Augmenter(AugmentSpec.model_validate({"gamma": {"probability": 1.0, "low": 2.0, "high": 2.0}}))
    image = torch.tensor([-1.0, 0.0, 1.0, 3.0]).reshape(1, 1, 2, 2)
    draws = augmenter.draw(2, 1, Chances(0, torch.arange(1)))
    moved, _ = augmenter.apply(image.clone(), torch.zeros(1, 1, 2, 2, dtype=torch.uint8), draws)
    assert moved.flatten().tolist() == pytest.approx([-1.0, -0.75, 0.0, 3.0])


def test_nothing_asked_for_changes_nothing() -> None:
    augmenter = Augmenter(AugmentSpec())
    image, label = noise((5, 6, 7))
    moved, moved_label = augmenter.apply(
        image.clone(), label.clone(), augmenter.draw(3, 2, Chances(0, torch.arange(1)))
    )
    assert torch.equal(moved, image)
    assert torch.equal(moved_label, label)
