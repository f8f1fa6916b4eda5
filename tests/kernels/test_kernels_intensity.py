"""Intensity augmentation by a table: the kernels, their plain form and the techniques one by one are the same; launches are
the same whatever was drawn.

The kernels run on a GPU, or where Triton's interpreter is switched on, on the CPU; the plain form is tested everywhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.augment import INTENSITY, Augmenter, Chances, Draws
from fasttrain.kernels import intensity
from fasttrain.kernels.noise import normal_field, philox
from fasttrain.kernels.rows import INTERPRETED
from fasttrain.recipe.augment_spec import AugmentSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = pytest.param(intensity.apply, marks=[] if INTERPRETED else [pytest.mark.gpu], id="kernels")
FORMS = [pytest.param(intensity.plain, id="plain"), KERNELS]
BOTH = {"retain_stats": True, "balanced": True}
SPECS: dict[str, dict] = {
    **{name: {name: {}} for name in INTENSITY},
    "all": {name: BOTH if "gamma" in name else {} for name in INTENSITY},
    "all, gamma without stats": {name: {} for name in INTENSITY},
    "noise shift": {"noise": {}, "shift_intensity": {}},
    "contrast gamma": {"contrast": {}, "gamma": {}},
    "contrast gamma with stats": {"contrast": {}, "gamma": BOTH},
    "unclipped contrast gamma": {"contrast": {"preserve_range": False}, "gamma": BOTH},
    "blur brightness gamma_inverted": {"blur": {}, "brightness": {}, "gamma_inverted": {}},
    "noise low_resolution gamma": {"noise": {}, "low_resolution": {}, "gamma": {}},
    "wide blur": {"blur": {"low": 0.3, "high": 4.5}},
}
LAYOUTS = [  # channels, shape, whether the channels of a voxel lie side by side
    (1, (16, 16, 16), True),
    (3, (11, 16, 13), True),
    (2, (11, 16, 13), False),
    (2, (47, 49), True),
    (1, (1, 9, 12), True),
    (2, (1, 1, 30), True),
]


def augmenter_of(section: dict, probability: float = 0.5) -> Augmenter:
    values = {name: {"probability": probability, **more} for name, more in section.items()}
    for name in values.keys() & {"blur", "low_resolution"}:
        values[name]["channel_probability"] = 0.7
    return Augmenter(AugmentSpec.model_validate(values))


def drawn(augmenter: Augmenter, image: Tensor, first: int = 0, seed: int = 9) -> tuple[Draws, Tensor]:
    draws = augmenter.draw(image.dim() - 2, image.shape[1], Chances(seed, torch.arange(first, first + len(image))))
    return draws, augmenter.table(draws, image.shape[1], image.shape[2:]).to(image.device)


def patches(count: int, channels: int, shape: tuple[int, ...], channels_last: bool = True) -> Tensor:
    image = torch.randn(count, *shape, channels, generator=torch.Generator().manual_seed(1)) * 0.5 + 1
    image = image.movedim(-1, 1) if channels_last else image.movedim(-1, 1).contiguous()
    return image.to(DEVICE)


def one_by_one(augmenter: Augmenter, image: Tensor, draws: Draws) -> Tensor:
    """Technique after technique, sample by sample."""
    image = image.clone()
    for row in range(len(image)):
        for name, technique in augmenter.intensity.items():
            if draws[name]["active"][row]:
                theirs = {key: value[row : row + 1] for key, value in draws[name].items()}
                image[row : row + 1] = technique.apply(image[row : row + 1].clone(), theirs)
    return image


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("channels", "shape", "channels_last"), LAYOUTS)
@pytest.mark.parametrize("section", SPECS.values(), ids=SPECS)
def test_a_batch_is_its_techniques_one_by_one(
    form, section: dict, channels: int, shape: tuple[int, ...], channels_last: bool
) -> None:
    augmenter = augmenter_of(section)
    image = patches(9, channels, shape, channels_last)
    draws, table = drawn(augmenter, image)
    found = form(image.clone(), table, augmenter.chain)
    # Where a coarse voxel is looked up among 49, its share is a float32 that ends at 4e-6
    torch.testing.assert_close(found, one_by_one(augmenter, image, draws), rtol=0, atol=1e-5)
    assert (found != image).any()
    touched = torch.stack([draws[name]["active"] for name in section]).any(0).to(DEVICE)
    assert (~touched).any() or len(section) > 4  # else nothing is asserted here
    assert torch.equal(found[~touched], image[~touched])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_drawn_leaves_every_bit(form) -> None:
    augmenter = augmenter_of(SPECS["all"], probability=0.0)
    image = patches(3, 2, (9, 16, 17))
    image[0, 0, 0] = torch.tensor([-0.0, 1e-40, 3e38, float("inf"), 1e-20, -7.0, 0.1, 1.0] * 2 + [0.0])
    _, table = drawn(augmenter, image)
    found = form(image.clone(), table, augmenter.chain)
    assert torch.equal(found.view(torch.int32), image.view(torch.int32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(11, 16, 13), (47, 49)], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(form, shape: tuple[int, ...]) -> None:
    augmenter = augmenter_of(SPECS["all"])
    image = patches(6, 2, shape)
    _, table = drawn(augmenter, image, first=40)
    together = form(image.clone(), table, augmenter.chain)
    for row in range(6):
        _, alone = drawn(augmenter, image[row : row + 1], first=40 + row)
        assert torch.equal(alone[0], table[row])
        assert torch.equal(form(image[row : row + 1].clone(), alone, augmenter.chain)[0], together[row])


@pytest.mark.parametrize("form", FORMS)
def test_constant_channels_and_a_table_within_another(form) -> None:
    augmenter = augmenter_of(SPECS["all"], probability=1.0)
    image = patches(4, 2, (12, 15, 14))
    image[1, 0] = 2.5
    draws, table = drawn(augmenter, image)
    wider = torch.cat([torch.full((4, 13), 99, dtype=torch.int32, device=DEVICE), table], 1)
    expected = one_by_one(augmenter, image, draws)
    found = form(image.clone(), wider[:, 13:], augmenter.chain)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


class Operations(TorchDispatchMode):
    """Notes torch's operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.names: list[str] = []
        return super().__enter__()


def test_the_plain_form_has_the_same_operations_whatever_was_drawn() -> None:
    augmenter = augmenter_of(SPECS["all"])
    image, lists = patches(3, 2, (8, 9, 7)), []
    for first in (0, 50, 100):
        _, table = drawn(augmenter, image, first)
        with Operations() as operations:
            intensity.plain(image, table, augmenter.chain)
        lists.append(operations.names)
    assert lists[0] == lists[1] == lists[2]
    waiting = ("_local_scalar_dense", "nonzero", "item", "_to_copy.default_cpu")
    assert not [name for name in lists[0] if any(word in name for word in waiting)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["all", "noise shift"])
def test_a_graph_of_the_launches_takes_any_table(name: str) -> None:
    augmenter = augmenter_of(SPECS[name])
    source = patches(9, 1, (40, 56, 40))
    image, (_, table) = source.clone(), drawn(augmenter, source)
    intensity.apply(image, table, augmenter.chain)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        image.copy_(source)
        intensity.apply(image, table, augmenter.chain)
    for first in (0, 50, 100):
        _, other = drawn(augmenter, source, first)
        table.copy_(other)
        graph.replay()
        assert torch.equal(image, intensity.apply(source.clone(), other, augmenter.chain))
        assert not torch.equal(image, source)


@pytest.mark.gpu
def test_the_host_is_not_waited_for() -> None:
    augmenter = augmenter_of(SPECS["all"])
    image = patches(4, 1, (24, 24, 24))
    _, table = drawn(augmenter, image)
    augmenter.apply_table(image, table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmenter.apply_table(image, table)
        intensity.plain(image, table, augmenter.chain)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_philox_gives_its_authors_numbers() -> None:
    """Random123's known answers for philox4x32 with 10 rounds, of counters that are 0 but for their first word."""
    words = philox(torch.tensor([0]), (torch.tensor(0), torch.tensor(0)))
    assert [f"{int(word):08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_noise_is_normal_and_a_function_of_seed_channel_and_voxel() -> None:
    seeds = [torch.tensor(seed, device=DEVICE) for seed in (5, 6, 5 + 2**40)]
    fields = [normal_field(seed, 2, 60_001).cpu().double().numpy() for seed in seeds]
    rows = np.concatenate(fields)
    for row in rows:
        assert stats.kstest(row, "norm").pvalue > 1e-3
        assert abs(stats.kurtosis(row)) < 0.1
    neighbours = np.concatenate([rows[:, :-4], rows[:, 1:-3], rows[:, 2:-2], rows[:, 3:-1]])
    off = np.corrcoef(neighbours) - np.eye(len(neighbours))
    assert np.abs(off).max() < 0.021  # five standard deviations
    assert np.abs(np.corrcoef(np.abs(neighbours)) - np.eye(len(neighbours))).max() < 0.021
    fewer = normal_field(seeds[0], 1, 777).cpu().double().numpy()
    assert np.array_equal(fewer[0], fields[0][0, :777])


@pytest.mark.parametrize("form", FORMS)
def test_noise_is_that_of_the_seed_drawn(form) -> None:
    augmenter = augmenter_of({"noise": {"std": 0.5}}, probability=1.0)
    image = patches(3, 2, (13, 14, 15))
    draws, table = drawn(augmenter, image)
    noise = form(image.clone(), table, augmenter.chain) - image
    for row in range(3):
        field = normal_field(draws["noise"]["seed"][row].to(DEVICE), 2, 13 * 14 * 15).view(2, 13, 14, 15)
        torch.testing.assert_close(noise[row], field * draws["noise"]["std"][row].to(DEVICE), rtol=0, atol=2e-6)
