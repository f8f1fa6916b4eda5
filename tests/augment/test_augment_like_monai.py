"""What a batch is spread like, by the table: as MONAI's transforms of the same ranges, over many draws of each."""

from __future__ import annotations

from collections.abc import Callable

import monai.transforms as peers
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fasttrain.augment import Augmenter, Chances, chances
from fasttrain.recipe.augment_spec import AugmentSpec

COUNT = 300
SHAPE = (13, 15, 11)  # odd, so that no two voxels are equally near to a coarse one
NEAREST = {"downsample_mode": "nearest-exact", "upsample_mode": "trilinear"}


def patch() -> Tensor:
    return torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(2)) ** 2 + 0.5


def inner(image: Tensor) -> Tensor:
    """Away from the edge, where a blur's idea of the outside counts."""
    return image[..., 4:-4, 4:-4, 3:-3]


def roughness(image: Tensor) -> Tensor:
    return (image[..., 1:] - image[..., :-1]).flatten(1).std(1)


def middle(image: Tensor) -> Tensor:
    return image.flatten(1).median(1).values


def noise_spread(image: Tensor) -> Tensor:
    return (image - patch()).flatten(1).std(1)


def ratio(image: Tensor) -> Tensor:
    return (image / patch()).flatten(1).mean(1)


PAIRS: dict[str, tuple[dict, Callable, list[Callable]]] = {
    "noise": (
        {"noise": {"std": 0.3}},
        lambda prob: peers.RandGaussianNoise(prob=prob, std=0.3),
        [noise_spread, middle, roughness],
    ),
    "blur": (
        {"blur": {"low": 0.5, "high": 1.0}},
        lambda prob: peers.RandGaussianSmooth((0.5, 1.0), (0.5, 1.0), (0.5, 1.0), prob=prob, approx="sampled"),
        [lambda image: inner(image).flatten(1).std(1), lambda image: roughness(inner(image))],
    ),
    "scale_intensity": (
        {"scale_intensity": {"low": 0.75, "high": 1.25}},
        lambda prob: peers.RandScaleIntensity(factors=(-0.25, 0.25), prob=prob),
        [ratio, middle, roughness],
    ),
    "shift_intensity": (
        {"shift_intensity": {"offset": 0.2}},
        lambda prob: peers.RandShiftIntensity(offsets=0.2, prob=prob),
        [middle, lambda image: image.flatten(1).amin(1)],
    ),
    "gamma": (
        {"gamma": {"low": 0.7, "high": 1.5}},
        lambda prob: peers.RandAdjustContrast(prob=prob, gamma=(0.7, 1.5)),
        [middle, lambda image: image.flatten(1).mean(1), lambda image: image.flatten(1).std(1)],
    ),
    "gamma that retains": (
        {"gamma_inverted": {"low": 0.7, "high": 1.5, "retain_stats": True}},
        lambda prob: peers.RandAdjustContrast(prob=prob, gamma=(0.7, 1.5), invert_image=True, retain_stats=True),
        [middle, lambda image: image.flatten(1).amax(1)],
    ),
    "low_resolution": (
        {"low_resolution": {"low": 0.5, "high": 1.0}},
        lambda prob: peers.RandSimulateLowResolution(prob=prob, zoom_range=(0.5, 1.0), **NEAREST),
        [roughness, lambda image: image.flatten(1).std(1)],
    ),
}


def ours(section: dict, probability: float, seed: int = 0) -> Tensor:
    (name, values), *_ = section.items()
    augmenter = Augmenter(AugmentSpec.model_validate({name: {"probability": probability, **values}}))
    draws = augmenter.draw(3, 1, Chances(seed, torch.arange(COUNT)))
    image = patch().expand(COUNT, 1, *SHAPE).clone()
    return augmenter.apply_table(image, augmenter.table(draws, 1, SHAPE))[:, 0]


def theirs(transform: peers.RandomizableTransform) -> Tensor:
    transform.set_random_state(seed=4)
    return torch.stack([torch.as_tensor(transform(patch().clone()))[0] for _ in range(COUNT)])


@pytest.mark.parametrize("name", PAIRS)
def test_a_technique_is_spread_as_monais(name: str) -> None:
    section, peer, measures = PAIRS[name]
    one, other = ours(section, 1.0), theirs(peer(1.0))
    for measure in measures:
        assert stats.ks_2samp(measure(one).double(), measure(other).double()).pvalue > 1e-3
    # A gate that passes anything would be none: a narrower range does not pass
    (technique, values), *_ = section.items()
    ends = {key: value * 0.6 for key, value in values.items() if key in ("std", "offset")}
    ends |= {"low": 0.9 * values["high"]} if "high" in values else {}
    narrower = ours({technique: {**values, **ends}}, 1.0)
    assert min(stats.ks_2samp(measure(narrower), measure(other)).pvalue for measure in measures) < 1e-3


@pytest.mark.parametrize("name", ["noise", "gamma", "low_resolution"])
def test_as_many_are_changed_as_monai_changes(name: str) -> None:
    section, peer, _ = PAIRS[name]
    for images in (ours(section, 0.3), theirs(peer(0.3))):
        changed = (images != patch()).flatten(1).any(1)
        # A zoom that rounds to as many voxels changes none
        assert changed.double().mean() == pytest.approx(0.3, abs=0.08)
        assert torch.equal(images[~changed], patch().expand(COUNT, *SHAPE)[~changed])


def test_a_batch_is_drawn_in_a_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn name by name, a batch's parameters take longer than a step of a small network."""
    calls = []
    made = chances._finalised
    monkeypatch.setattr(chances, "_finalised", lambda state: calls.append(state.shape) or made(state))
    names = set(AugmentSpec.model_fields)
    augmenter = Augmenter(AugmentSpec.model_validate({name: {"probability": 0.2} for name in names}))
    draws = augmenter.draw(3, 4, Chances(0, np.arange(36)))
    # The streams, all chances, the seeds of noise, the points of those that bend
    assert len(calls) == 4
    assert calls[-2][0] == int(draws["elastic"]["active"].sum()) < 36
    assert draws.keys() == names
