"""Draws of one technique do not depend on which others a recipe names, nor bits on the number of threads."""

import itertools
from pathlib import Path

import pytest
import torch

from fasttrain.augment import INTENSITY, SPATIAL, Augmenter, Chances
from fasttrain.recipe import resolve
from fasttrain.recipe.augment_spec import AugmentSpec

NAMES = ["rotate", "scale", "flip", "elastic", *INTENSITY]

# What nnU-Net v2 applies unless told otherwise (nnUNetTrainer.get_training_transforms)
NNUNET = """
augment:
  rotate: {probability: 0.2, degrees: 30}
  scale: {probability: 0.2, low: 0.7, high: 1.4}
  noise: {probability: 0.1, std: 0.1}
  blur: {probability: 0.2, low: 0.5, high: 1.0, channel_probability: 0.5}
  brightness: {probability: 0.15, low: 0.75, high: 1.25}
  contrast: {probability: 0.15, low: 0.75, high: 1.25, preserve_range: true}
  low_resolution: {probability: 0.25, low: 0.5, high: 1.0, channel_probability: 0.5}
  gamma_inverted: {probability: 0.1, low: 0.7, high: 1.5, retain_stats: true, balanced: true}
  gamma: {probability: 0.3, low: 0.7, high: 1.5, retain_stats: true, balanced: true}
  flip: {probability: 0.5, axes: AXES}
"""


PINNED: dict = {
    "active": [True, False, False, False, True],
    "std": [0.01759399, 0.04467895, 0.0245097, 0.09670346, 0.04575021],
    "seed": [4442699110001554923, 543380291730454751, 4039347867780246593, 390533649278050131, 1356068158928638189],
    "power": [1.1731458, 1.2760091],
}


def augmenter_of(names: list[str]) -> Augmenter:
    return Augmenter(AugmentSpec.model_validate({name: {"probability": 0.5} for name in names}))


def drawn(names: list[str], seed: int = 7) -> dict:
    return augmenter_of(names).draw(3, 2, Chances(seed, torch.arange(5)))


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def test_every_technique_of_the_recipe_has_an_order_here() -> None:
    assert set(AugmentSpec.model_fields) == {*SPATIAL, *INTENSITY, "flip", "elastic"}
    for name, kind in {**SPATIAL, **INTENSITY}.items():
        assert kind.name == name


@pytest.mark.parametrize("name", NAMES)
def test_to_add_a_technique_changes_no_draw_of_another(name: str) -> None:
    without = [other for other in NAMES if other != name]
    before, after = drawn(without), drawn([*without, name])
    assert all(same(before[other], after[other]) for other in without)
    assert same(drawn([name])[name], after[name])
    assert not same(drawn([name], seed=8)[name], after[name])


def test_draws_of_recorded_runs_stay_what_they_were() -> None:
    """Pinned: a resumed run must draw what its first half would have."""
    draws = drawn(["rotate", "noise", "gamma"])
    assert draws["rotate"]["active"].tolist() == PINNED["active"]
    assert draws["noise"]["std"].tolist() == pytest.approx(PINNED["std"], abs=1e-7)
    assert draws["noise"]["seed"].tolist() == PINNED["seed"]
    assert draws["gamma"]["power"][0].tolist() == pytest.approx(PINNED["power"], abs=1e-6)


def test_absent_techniques_draw_nothing() -> None:
    assert Augmenter(AugmentSpec()).draw(3, 1, Chances(0, torch.arange(4))) == {}


def test_techniques_are_drawn_apart() -> None:
    names = [name for name in NAMES if name != "flip"]
    draws = augmenter_of(names).draw(3, 1, Chances(0, torch.arange(3000)))
    table = torch.stack([draws[name]["active"].float() for name in names])
    correlations = torch.corrcoef(table) - torch.eye(len(names))
    assert correlations.abs().max() < 0.08


@pytest.mark.parametrize(("size", "axes"), [((16, 24, 8), (0, 1, 2)), ((24, 32), (0, 1))], ids=["3d", "2d"])
def test_the_default_set_of_nnunet_can_be_written_and_runs(tmp_path: Path, size: tuple, axes: tuple) -> None:
    recipe = tmp_path / "nnunet.yaml"
    recipe.write_text("extends: demo\n" + NNUNET.replace("AXES", str(list(axes))))
    flat = ["patch.size=[24, 32]", "data.spacing=null", "validation.mirror=[0, 1]", "network={kind: dynunet, features: "
            "[4, 8, 8], strides: [2, 2]}"]  # fmt: skip
    spec = resolve(str(recipe), flat if len(size) == 2 else []).recipe.augment
    assert spec.gamma is not None
    assert spec.gamma.retain_stats
    augmenter = Augmenter(spec)
    count = 120
    draws = augmenter.draw(len(size), 2, Chances(0, torch.arange(count)))
    image = torch.randn(count, 2, *size, generator=torch.Generator().manual_seed(0)) + 1
    label = (image[:, :1] > 1.5).to(torch.uint8) * 3
    moved, moved_label = augmenter.apply(image.clone(), label.clone(), draws)
    assert torch.isfinite(moved).all()
    assert set(moved_label.unique().tolist()) == {0, 3}
    touched = torch.stack([draws[name]["active"] for name in draws if name != "flip"])
    assert touched.any(1).all()  # every technique had its turn
    left_alone = ~touched.any(0) & ~draws["flip"]["mirrored"].any(1)
    assert left_alone.any()
    assert torch.equal(moved[left_alone], image[left_alone])
    intensity_only = ~(draws["rotate"]["active"] | draws["scale"]["active"] | draws["flip"]["mirrored"].any(1))
    assert torch.equal(moved_label[intensity_only], label[intensity_only])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """A worker has one thread, the trainer several."""
    names = [name for name in NAMES if name != "gamma_inverted"]
    spec: dict = {name: {"probability": 1.0} for name in names}
    spec["flip"]["axes"] = [0, 1]
    for gamma in ("gamma", "gamma_inverted"):
        spec[gamma] = {"probability": 1.0, "retain_stats": True}
    augmenter = Augmenter(AugmentSpec.model_validate(spec))
    former = torch.get_num_threads()
    try:
        for shape in [(48, 48, 40), (300, 280)]:
            draws = augmenter.draw(len(shape), 1, Chances(4, torch.arange(1)))
            image = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(5))
            label = (image > 0).to(torch.uint8)
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(augmenter.apply(image.clone(), label.clone(), draws))
            for one, other in itertools.combinations(results, 2):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])
    finally:
        torch.set_num_threads(former)
