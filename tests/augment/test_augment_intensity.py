"""Blur, brightness, contrast, low resolution and gamma against scipy, torch, MONAI and nnU-Net's formulas."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.transforms import RandSimulateLowResolution
from scipy import ndimage, stats

from fasttrain.augment import Augmenter, Chances
from fasttrain.augment.blur import Blur
from fasttrain.augment.low_resolution import LowResolution
from fasttrain.augment.technique import around_one, channel_mean
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve
from fasttrain.recipe.augment_spec import AugmentSpec, BlurSpec, LowResolutionSpec

NAMES = ["blur", "brightness", "contrast", "low_resolution", "gamma_inverted", "gamma"]
NEUTRAL = {
    "brightness": {"low": 1.0, "high": 1.0},
    "contrast": {"low": 1.0, "high": 1.0},
    "low_resolution": {"low": 1.0, "high": 1.0},
    "gamma": {"low": 1.0, "high": 1.0, "retain_stats": True},
    "gamma_inverted": {"low": 1.0, "high": 1.0},
    "blur": {"low": 0.01, "high": 0.01},
}
SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)


def volume(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 3


def applied(section: dict, image: torch.Tensor, seed: int = 1) -> tuple[torch.Tensor, dict]:
    """Augments a copy; a label of noise must come back as it was."""
    augmenter = Augmenter(AugmentSpec.model_validate(section))
    draws = augmenter.draw(image.dim() - 2, image.shape[1], Chances(seed, torch.arange(len(image))))
    label = (volume(len(image), 1, *image.shape[2:], seed=9) > 3).to(torch.uint8)
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), draws)
    assert torch.equal(moved_label, label)
    return moved, draws


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(9, 12, 7), (8, 11), (1, 8, 9)])
def test_neutral_parameters_change_nothing(name: str, shape: tuple[int, ...]) -> None:
    image = volume(3, 2, *shape)
    moved, draws = applied({name: {"probability": 1.0, **NEUTRAL[name]}}, image)
    assert draws[name]["active"].all()
    assert torch.allclose(moved, image, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_nought_and_one(name: str) -> None:
    image = volume(20, 2, 9, 8, 10)
    never, _ = applied({name: {"probability": 0.0}}, image)
    assert torch.equal(never, image)
    # A zoom near 1 keeps the size, and with it every voxel
    section = {name: {"probability": 1.0, **({"high": 0.8} if name == "low_resolution" else {})}}
    always, _ = applied(section, image)
    assert ((always != image).flatten(2).any(2)).all()
    again, _ = applied(section, image)
    assert torch.equal(always, again)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, name=st.sampled_from(NAMES), channels=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_shape_keeps_shape_and_stays_finite(shape: tuple, name: str, channels: int, seed: int) -> None:
    image = volume(2, channels, *shape, seed=seed)
    image[0, 0] = 2.5  # a constant channel has neither range nor spread
    section = {"probability": 1.0, **({"retain_stats": True} if "gamma" in name else {})}
    moved, _ = applied({name: section}, image, seed)
    assert moved.shape == image.shape
    assert moved.dtype == torch.float32
    assert torch.isfinite(moved).all()
    if name != "brightness":
        assert torch.allclose(moved[0, 0], image[0, 0], atol=1e-5)
        room = 1e-4 + (image.amax() - image.amin()) * (0.0 if "gamma" not in name else 2.0)
        assert moved.amin() >= image.amin() - room
        assert moved.amax() <= image.amax() + room


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, low=st.floats(0.05, 1.0), spread=st.floats(0.0, 2.0), seed=st.integers(0, 99))
def test_blur_is_scipys_gaussian_filter(shape: tuple, low: float, spread: float, seed: int) -> None:
    image = volume(2, 2, *shape, seed=seed)
    moved, draws = applied({"blur": {"probability": 1.0, "low": low, "high": low + spread}}, image, seed)
    sigma = draws["blur"]["sigma"]
    assert low - 1e-5 <= sigma.min()
    assert sigma.max() <= low + spread + 1e-5
    for sample in range(2):
        for channel in range(2):
            spreads = sigma[sample, channel, : len(shape)].tolist()
            # As far out as ours, whose kernels all have the length of the widest; scipy's own cut is 4
            cuts = [int(4 * (low + spread) + 0.5) for _ in spreads]
            expected = ndimage.gaussian_filter(
                image[sample, channel].double().numpy(), spreads, mode="reflect", radius=cuts
            )
            assert np.abs(moved[sample, channel].numpy() - expected).max() < 1e-4


def test_blur_is_close_to_scipys_default_too() -> None:
    image = volume(1, 1, 24, 30, 18)
    moved, draws = applied({"blur": {"probability": 1.0}}, image)
    expected = ndimage.gaussian_filter(image[0, 0].numpy(), draws["blur"]["sigma"][0, 0].tolist())
    assert np.abs(moved[0, 0].numpy() - expected).max() < 2e-3
    assert moved.std() < 0.8 * image.std()


@pytest.mark.parametrize(("name", "key"), [("blur", "sigma"), ("low_resolution", "zoom")])
def test_channels_are_chosen_by_themselves(name: str, key: str) -> None:
    image = volume(300, 3, 6, 7)
    section = {name: {"probability": 1.0, "channel_probability": 0.5}}
    if name == "low_resolution":
        section[name]["high"] = 0.6
    moved, draws = applied(section, image)
    changed = (moved != image).flatten(2).any(2)
    assert torch.equal(changed, draws[name]["chosen"])
    assert changed.float().mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.1)
    assert (torch.corrcoef(changed.float().T) - torch.eye(3)).abs().max() < 0.2
    assert draws[name][key][0, 0].ravel()[0] != draws[name][key][0, 1].ravel()[0]
    none, _ = applied({name: {"probability": 1.0, "channel_probability": 0.0}}, image[:9])
    assert torch.equal(none, image[:9])


@pytest.mark.parametrize("shape", [(16, 21, 12), (18, 25), (1, 20, 14)])
def test_low_resolution_is_torchs_nearest_down_and_linear_up(shape: tuple[int, ...]) -> None:
    image = volume(3, 2, *shape)
    moved, draws = applied({"low_resolution": {"probability": 1.0, "low": 0.3}}, image)
    for sample in range(3):
        for channel in range(2):
            zoom = float(draws["low_resolution"]["zoom"][sample, channel])
            one = image[sample, channel][None, None]
            smaller = [max(1, round(length * zoom)) for length in shape]
            coarse = F.interpolate(one, size=smaller, mode="nearest-exact")
            mode = "trilinear" if len(shape) == 3 else "bilinear"
            assert torch.equal(moved[sample, channel], F.interpolate(coarse, size=shape, mode=mode)[0, 0])


def test_low_resolution_is_that_of_monai() -> None:
    technique = LowResolution(LowResolutionSpec(probability=1.0, low=0.5, high=0.5))
    image = volume(1, 1, 16, 20, 12)
    theirs = RandSimulateLowResolution(
        prob=1.0, zoom_range=(0.5, 0.5), downsample_mode="nearest-exact", upsample_mode="trilinear", align_corners=False
    )(image[0])
    draw = technique.draw(1, Chances(0, torch.arange(1)))
    ours = technique.apply(image.clone(), draw)[0]
    assert torch.allclose(ours, torch.as_tensor(theirs), atol=1e-5)
    assert not torch.allclose(ours, image[0], atol=0.5)


@pytest.mark.parametrize("shape", [(9, 8, 7), (12, 10)])
def test_contrast_stretches_about_the_mean_and_keeps_the_range(shape: tuple[int, ...]) -> None:
    image = volume(40, 2, *shape)
    low, high = image.flatten(2).amin(2), image.flatten(2).amax(2)
    factors = {}
    for preserve in (True, False):
        section = {"contrast": {"probability": 1.0, "low": 0.5, "high": 2.0, "preserve_range": preserve}}
        moved, draws = applied(section, image)
        factor = factors[preserve] = draws["contrast"]["factor"].reshape(40, 2, *(1,) * len(shape))
        mean = image.flatten(2).mean(2).reshape(factor.shape)
        expected = (image - mean) * factor + mean
        if preserve:
            assert torch.all(moved.flatten(2).amin(2) >= low)
            assert torch.all(moved.flatten(2).amax(2) <= high)
            expected = expected.clamp(low.reshape(factor.shape), high.reshape(factor.shape))
        else:
            assert torch.allclose(moved.flatten(2).mean(2), image.flatten(2).mean(2), atol=1e-4)
            assert (moved.flatten(2).amax(2) > high).any()
        assert torch.allclose(moved, expected, atol=1e-4)
    assert torch.equal(factors[True], factors[False])


def test_brightness_multiplies() -> None:
    image = volume(4, 2, 6, 5, 4)
    moved, draws = applied({"brightness": {"probability": 1.0}}, image)
    assert torch.allclose(moved, image * draws["brightness"]["factor"].reshape(4, 2, 1, 1, 1))
    assert draws["brightness"]["factor"].unique().numel() == 8


@pytest.mark.parametrize(("low", "high"), [(0.7, 1.5), (1.2, 1.5), (0.3, 0.9), (1.0, 1.0), (0.5, 1.0)])
def test_balanced_factors_lie_on_either_side_of_one(low: float, high: float) -> None:
    factors = around_one(low, high, Chances(0, torch.arange(1000)).numbers("factor", 8)).ravel().astype(np.float64)
    assert low - 1e-6 <= factors.min()
    assert factors.max() <= high + 1e-6
    if low < 1 < high:
        assert (factors < 1).mean() == pytest.approx(0.5, abs=0.03)
        assert stats.kstest(factors[factors < 1], stats.uniform(low, 1 - low).cdf).pvalue > 1e-3
        assert stats.kstest(factors[factors > 1], stats.uniform(1, high - 1).cdf).pvalue > 1e-3
    elif low < high:
        assert stats.kstest(factors, stats.uniform(low, high - low).cdf).pvalue > 1e-3


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_gamma_is_nnunets_formula(inverted: bool, retain: bool) -> None:
    name = "gamma_inverted" if inverted else "gamma"
    image = volume(6, 2, 8, 9, 7)
    moved, draws = applied({name: {"probability": 1.0, "low": 0.5, "high": 2.0, "retain_stats": retain}}, image)
    for sample in range(6):
        for channel in range(2):
            power = float(draws[name]["power"][sample, channel])
            one = image[sample, channel].double().numpy() * (-1 if inverted else 1)
            mean, std, lowest, span = one.mean(), one.std(), one.min(), np.ptp(one)
            expected = ((one - lowest) / span) ** power * span + lowest
            if retain:
                expected = (expected - expected.mean()) * std / expected.std() + mean
            assert np.abs(moved[sample, channel].numpy() - expected * (-1 if inverted else 1)).max() < 1e-4
    kept = torch.allclose(moved.flatten(2).std(2), image.flatten(2).std(2), rtol=1e-4)
    assert kept is retain


def test_balanced_powers_are_half_below_one() -> None:
    image = volume(400, 1, 2, 2)
    for balanced, share in ((True, 0.5), (False, 0.3 / 0.8)):
        _, draws = applied({"gamma": {"probability": 1.0, "balanced": balanced}}, image)
        assert (draws["gamma"]["power"] < 1).float().mean() == pytest.approx(share, abs=0.07)


@given(shape=st.lists(st.integers(1, 12), min_size=2, max_size=3))
@settings(max_examples=20, deadline=None)
def test_the_mean_of_a_channel(shape: list[int]) -> None:
    image = volume(2, 3, *shape)
    assert torch.allclose(channel_mean(image).flatten(), image.flatten(2).mean(2).flatten(), atol=1e-5)


def test_blur_with_no_channel_chosen_asks_for_nothing() -> None:
    blur = Blur(BlurSpec(probability=1.0, channel_probability=0.0))
    draw = blur.draw(2, Chances(0, torch.arange(1)))
    image = volume(1, 2, 4, 4)
    assert torch.equal(blur.apply(image.clone(), draw), image)


FOLDS = "could fold the patch over itself; use a magnitude of at most"


@pytest.mark.parametrize(
    ("text", "key", "told"),
    [
        ("blur={probability: 0.2, low: 2}", "blur.low", "2 is above high, 1"),
        ("blur={probability: 0.2, high: 0.2}", "blur.high", "0.2 is below low, 0.5"),
        ("blur={probability: 0.2, low: 0}", "blur.low", "should be greater than 0, found 0"),
        ("blur={probability: 0.2, high: 99}", "blur.high", "should be less than or equal to 16, found 99"),
        ("brightness={probability: 2}", "brightness.probability", "should be less than or equal to 1, found 2"),
        ("contrast={probability: 1, low: 3, high: 2}", "contrast.low", "3 is above high, 2"),
        (
            "low_resolution={probability: 1, high: 2}",
            "low_resolution.high",
            "should be less than or equal to 1, found 2",
        ),
        ("gamma_inverted={probability: 1, low: 2}", "gamma_inverted.low", "2 is above high, 1.5"),
        ("scale={probability: 1, low: 2}", "scale.low", "2 is above high, 1.15"),
        (
            "elastic={probability: 1, magnitude: 0.2}",
            "elastic.magnitude",
            f"magnitude 0.2 with 4 cells {FOLDS} 0.1, or 2 cells",
        ),
        (
            "elastic={probability: 1, cells: 9}",
            "elastic.cells",
            f"magnitude 0.08 with 9 cells {FOLDS} 0.044, or 5 cells",
        ),
        (
            "elastic={probability: 1, magnitude: 0.5, cells: 1}",
            "elastic.magnitude",
            f"magnitude 0.5 with 1 cell {FOLDS} 0.4",
        ),
        ("elastic={probability: 1, cells: 0}", "elastic.cells", "should be greater than or equal to 1, found 0"),
    ],
)
def test_ranges_that_cannot_be_are_refused(text: str, key: str, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve("demo", [f"augment.{text}"])
    assert caught.value.faults == (f"--set augment.{key}: {told}",)


def test_ranges_of_one_value_are_taken() -> None:
    augment = resolve("demo", ["augment.blur={probability: 0.2, low: 1, high: 1}",
                               "augment.elastic={probability: 1, magnitude: 0.1}"]).recipe.augment  # fmt: skip
    assert augment.blur.low == augment.blur.high == 1.0
    assert augment.elastic.cells == 4
