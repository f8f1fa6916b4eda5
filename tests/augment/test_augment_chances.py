"""Chances: SplitMix64 by seed, position and name, whatever the batch; even, and unrelated to their neighbours."""

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fasttrain.augment import Chances
from fasttrain.augment.chances import _STEP, _finalised

POSITIONS = st.lists(st.integers(0, 2**62), min_size=1, max_size=30)
MASK = 2**64 - 1


def finalised(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def reference(seed: int, position: int, name: str, index: int) -> float:
    """In Python's whole numbers, one at a time."""
    step = 0x9E3779B97F4A7C15
    stream = finalised((position * step + key(f"run {seed}")) & MASK)
    return (finalised((stream + key(f"chance {name}") + (index + 1) * step) & MASK) >> 40) / 2**24


def test_the_numbers_are_those_of_splitmix64() -> None:
    """The first outputs for the seed 0, as its reference implementation in C gives them."""
    made = _finalised(np.arange(1, 4, dtype=np.uint64) * _STEP)
    assert [hex(value) for value in made.tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@settings(max_examples=60, deadline=None)
@given(positions=POSITIONS, seed=st.integers(0, 2**70), name=st.text(max_size=9), count=st.integers(1, 7))
def test_every_number_is_a_function_of_seed_position_name_and_index(
    positions: list[int], seed: int, name: str, count: int
) -> None:
    made = Chances(seed, torch.tensor(positions))(name, count)
    assert made.dtype == torch.float32
    assert made.tolist() == [[reference(seed, one, name, index) for index in range(count)] for one in positions]


@settings(max_examples=60, deadline=None)
@given(positions=POSITIONS, data=st.data(), count=st.integers(1, 9), more=st.integers(0, 9))
def test_other_positions_and_a_larger_count_change_nothing(
    positions: list[int], data: st.DataObject, count: int, more: int
) -> None:
    whole = Chances(3, torch.tensor(positions))
    chosen = data.draw(st.lists(st.integers(0, len(positions) - 1), max_size=9))
    part = Chances(3, torch.tensor(positions)[chosen])
    assert torch.equal(part("x", count), whole("x", count + more)[chosen, :count])
    assert torch.equal(part.seeds("x"), whole.seeds("x")[chosen])
    start, end = sorted((data.draw(st.integers(0, len(positions))), data.draw(st.integers(0, len(positions)))))
    assert len(whole[start:end]) == end - start
    assert torch.equal(whole[start:end]("x", count), whole("x", count)[start:end])


def test_numbers_made_ready_are_those_asked_for_by_themselves() -> None:
    chances, apart = Chances(3, torch.arange(7)), Chances(3, torch.arange(7))
    chances.make_ready((("noise", 2), ("blur", 5), ("x", 1)))
    for name, count in [("noise", 2), ("blur", 3), ("blur", 9), ("x", 1), ("gamma", 2)]:
        assert torch.equal(chances(name, count), apart(name, count))
        assert torch.equal(chances[2:4](name, count), apart(name, count)[2:4])
    assert torch.equal(chances.seeds("noise"), apart.seeds("noise"))


def test_another_process_gives_the_same() -> None:
    text = "import torch; from fasttrain.augment import Chances; c = Chances(5, torch.arange(3)); "
    text += "print(c('noise', 2).tolist(), c.seeds('noise').tolist())"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=True)
    here = Chances(5, np.arange(3))
    assert told.stdout.strip() == f"{here('noise', 2).tolist()} {here.seeds('noise').tolist()}"


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize(("count", "positions"), [(1, 60_000), (300, 200), (60_000, 1)])
def test_numbers_are_spread_evenly(seed: int, count: int, positions: int) -> None:
    values = Chances(seed, torch.arange(positions))("x", count).flatten().double().numpy()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    # All 24 bits: the coarse places, and those within the finest
    whole = np.rint(values * 2**24).astype(np.int64)
    for shift in (16, 8, 0):
        assert stats.chisquare(np.bincount(whole >> shift & 255, minlength=256)).pvalue > 1e-3


def rows(seed: int = 0, first: int = 0, name: str = "x", index: int = 0, step: int = 1) -> np.ndarray:
    count = 40_000
    return Chances(seed, first + step * torch.arange(count))(name, index + 1)[:, index].double().numpy()


NEIGHBOURS = {
    "position": {"first": 1},
    "position after": {"first": 2},
    "position far on": {"first": 2**40},
    "seed": {"seed": 1},
    "name": {"name": "y"},
    "name with a number": {"name": "x1"},
    "index": {"index": 1},
    "position and index": {"first": 1, "index": 1},
    "every other position": {"step": 2, "first": 1},
}


@pytest.mark.parametrize("other", NEIGHBOURS, ids=lambda name: name.replace(" ", "-"))
def test_neighbours_are_unrelated(other: str) -> None:
    one, two = rows(), rows(**NEIGHBOURS[other])
    assert (one == two).mean() < 1e-3
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02  # four standard deviations
    cells = np.histogram2d(one, two, bins=16, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_no_two_of_many_names_correlate() -> None:
    chances = Chances(0, torch.arange(20_000))
    table = torch.cat([chances(f"technique {number}", 2).T for number in range(12)])
    assert (torch.corrcoef(table.double()) - torch.eye(24)).abs().max() < 0.035


def test_sums_over_a_batch_vary_as_independent_numbers_do() -> None:
    """Neighbours that were each a little alike would show in sums of many."""
    values = Chances(0, torch.arange(90_000))("x", 4).double().reshape(-1, 90, 4)
    for sums in (values.sum(1).flatten(), values.sum(2).flatten()):
        summands = 90 * 4 * 1000 / len(sums)
        spread = float(sums.std()) / (summands / 12) ** 0.5
        assert spread == pytest.approx(1.0, abs=0.05)


def test_seeds_have_62_bits_and_are_unrelated_to_chances() -> None:
    chances = Chances(0, torch.arange(30_000))
    seeds = chances.seeds("noise")
    assert seeds.dtype == torch.int64
    assert len(seeds.unique()) == 30_000
    assert int(seeds.min()) >= 0
    assert 2**61 < int(seeds.max()) < 2**62
    shares = seeds.double().numpy() / 2**62
    assert stats.kstest(shares, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(shares, chances("noise", 1)[:, 0].numpy())[0, 1]) < 0.025
    for one, other in itertools.combinations(
        [seeds, chances.seeds("blur"), Chances(1, torch.arange(30_000)).seeds("noise")], 2
    ):
        assert (one != other).all()


def test_no_positions_give_no_numbers() -> None:
    chances = Chances(0, torch.arange(0))
    assert len(chances) == 0
    assert chances("x", 3).shape == (0, 3)
    assert chances.seeds("x").shape == (0,)
