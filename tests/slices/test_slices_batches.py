"""Which slices a batch is made of, and that the device's own batches are those of a loader."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sliced_cases import Samples, sliced_recipe, write_set

from fasttrain.batches import LoaderSource, Loading, Order, ResidentSource, WindowOrder, fill
from fasttrain.batches.slices import SliceTurns

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CPU = torch.device("cpu")


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.floats(0, 1), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_a_round_has_every_filled_slice_once_and_a_share_of_the_empty(
    filled: list[bool], share: float, seed: int, case: int
) -> None:
    known = np.array(filled)
    full, empty = int(known.sum()), int((~known).sum())
    length = full + max(round(share * empty), 0 if full else 1)
    cases, turns = np.full(2 * length, case), np.arange(2 * length)
    found = SliceTurns(seed, share).at(cases, turns, lambda row: known)
    for part in (found[:length], found[length:]):
        assert len(set(part.tolist())) == length
        assert set(np.flatnonzero(known).tolist()) <= set(part.tolist())
    # Whoever begins in the middle, and in whatever order turns are asked for, gets the same
    order = np.random.default_rng(seed).permutation(2 * length)
    again = SliceTurns(seed, share).at(cases[order], turns[order], lambda row: known)
    assert np.array_equal(again, found[order])


def test_empty_slices_are_drawn_anew_each_round_and_evenly() -> None:
    filled = np.array([True] * 3 + [False] * 10)
    turns, cases = np.arange(5 * 400), np.zeros(5 * 400, np.int64)
    counts = Counter(SliceTurns(1, 0.2).at(cases, turns, lambda row: filled).tolist())
    assert [counts[one] for one in range(3)] == [400] * 3
    assert all(50 <= counts[one] <= 115 for one in range(3, 13)), counts  # 80 of each are expected


def test_turns_count_what_a_case_gave_before() -> None:
    order = Order(3, 2, seed=5)
    positions = np.arange(60)
    cases, turns = order.cases_at(positions), order.turns_at(positions)
    for case in range(3):
        assert turns[cases == case].tolist() == list(range(20))
    assert np.array_equal(order.turns_at(positions[17:40]), turns[17:40])


def test_turns_rise_under_a_window_of_cases_too() -> None:
    order = WindowOrder(lambda epoch: (epoch % 4, (epoch + 1) % 4), 1, seed=5, samples_per_epoch=7)
    positions = np.arange(7 * 12)
    cases, turns = order.cases_at(positions), order.turns_at(positions)
    for case in range(4):
        own = turns[cases == case]
        assert (np.diff(own) > 0).all(), "no turn comes twice"


def batches(root: Path, recipe: Any, count: int, first: int, kind: str = "loader", held: int | None = None) -> list:
    samples = Samples(root, recipe, count)
    order = Order(count, recipe.data.samples_per_case, 3)
    if kind == "loader":
        source: Any = LoaderSource(recipe, samples, order, CPU, Loading())
    else:
        voxels = sum(sample.label.numel() for sample in samples.samples[:held])
        resident = fill(samples, recipe, torch.device(kind), voxels * (4 * recipe.stored_channels + 1))
        assert len(resident.rest) == (0 if held is None else count - held)
        source = ResidentSource(recipe, resident, order, torch.device(kind))
    made = list(islice(source.batches(first), 6))
    source.close()
    return made


def test_a_patch_is_a_slice_of_its_case_and_its_neighbours_are_channels(tmp_path: Path) -> None:
    recipe = sliced_recipe(slices={"neighbours": 2}, channels=["a", "b"], patch={"size": [20, 20]})
    root = write_set(tmp_path, 3, channels=2)
    samples = {sample.name: sample for sample in Samples(root, recipe, 3).samples}
    seen: dict[str, list[int]] = {name: [] for name in samples}
    for batch in batches(root, recipe, 3, 0):
        assert batch.image.shape == (4, 10, 20, 20)
        for image, label, name in zip(batch.image, batch.label, batch.names, strict=True):
            volume = samples[name]
            (slice_number,) = (one for one in range(7) if torch.equal(image[4:6], volume.image[:, one]))
            seen[name].append(slice_number)
            assert torch.equal(label[0], volume.label[0, slice_number])
            around = [min(max(slice_number + step, 0), 6) for step in (-2, -1, 0, 1, 2)]
            assert torch.equal(image, torch.cat([volume.image[:, one] for one in around]))
    assert {len(set(found[:7])) for found in seen.values()} == {7}, "each slice comes once before any comes again"


def test_empty_slices_stay_out(tmp_path: Path) -> None:
    recipe = sliced_recipe(slices={"keep_empty": 0.0}, patch={"size": [20, 20]})
    root = write_set(tmp_path, 2)
    made = batches(root, recipe, 2, 0)
    assert all(label.any() for batch in made for label in batch.label)
    # Control: else most slices are empty
    kept = batches(root, sliced_recipe(patch={"size": [20, 20]}), 2, 0)
    assert any(not label.any() for batch in kept for label in batch.label)


def test_foreground_patches_are_centred_within_their_slice(tmp_path: Path) -> None:
    recipe = sliced_recipe(slices={"keep_empty": 0.0}, patch={"size": [8, 8], "foreground": 1.0})
    for batch in batches(write_set(tmp_path, 2), recipe, 2, 0):
        assert (batch.label[:, 0, 4, 4] == 1).all()


AUGMENTED = {
    "flip": {"probability": 0.5, "axes": [0, 1]},
    "rotate": {"probability": 0.7, "degrees": 30},
    "elastic": {"probability": 0.5},
    "noise": {"probability": 0.8, "std": 0.1},
    "brightness": {"probability": 0.8},
    "gamma": {"probability": 0.5},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("held", [None, 2, 0])
@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("augment", [{}, AUGMENTED])
def test_slices_on_the_device_are_those_of_a_loader(
    tmp_path: Path, device: str, held: int | None, neighbours: int, augment: dict
) -> None:
    recipe = sliced_recipe(
        slices={"neighbours": neighbours, "keep_empty": 0.5},
        channels=["a", "b"],
        patch={"foreground": 0.4},
        augment=augment,
    )
    root = write_set(tmp_path, 3, channels=2)
    loader, resident = (batches(root, recipe, 3, 5, kind, held) for kind in ("loader", device))
    tolerance = 2e-4 if augment else 0.0
    for one, other in zip(loader, resident, strict=True):
        assert (one.names, one.positions) == (other.names, other.positions)
        assert other.image.shape == (4, 2 * (2 * neighbours + 1), 16, 16)
        assert (one.image - other.image.cpu()).abs().max() <= tolerance
        assert (one.label != other.label.cpu()).float().mean() <= (2e-3 if augment else 0)


def test_the_slices_of_a_patch_change_alike_but_for_their_noise(tmp_path: Path) -> None:
    root = write_set(tmp_path, 1)
    same = {"slices": {"neighbours": 1}, "patch": {"size": [16, 20]}, "batch_size": 7}
    plain, bright, noisy = (
        batches(root, sliced_recipe(augment=augment, **same), 1, 0)[0].image
        for augment in (
            {},
            {"scale_intensity": {"probability": 1.0}},
            {"noise": {"probability": 1.0, "std": 1.0}},
        )
    )
    factors = (bright / plain).flatten(2)
    assert torch.allclose(factors, factors[:, :1, :1].expand_as(factors), atol=1e-3)
    assert factors[:, 0, 0].std() > 0.05, "each patch by a factor of its own"
    fields = (noisy - plain).flatten(2)
    fields = (fields - fields.mean(2, keepdim=True)) / fields.std(2, keepdim=True)
    assert ((fields[:, 0] * fields[:, 1]).mean(1).abs() < 0.2).all(), "noise of two slices is unrelated"


def test_a_stream_that_begins_later_has_the_same_slices(tmp_path: Path) -> None:
    recipe = sliced_recipe(slices={"keep_empty": 0.4}, augment=AUGMENTED)
    root = write_set(tmp_path, 3)
    whole, later = batches(root, recipe, 3, 0), batches(root, recipe, 3, 8)
    for one, other in zip(whole[2:], later[:4], strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.label, other.label)
