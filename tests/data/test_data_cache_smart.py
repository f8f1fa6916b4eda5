"""The smart cache is MONAI's scheme to the item, and a function of the epoch alone."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from cache_checks import RECIPE, assert_same, assert_true, write_cases
from data_builders import make_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import SmartCacheDataset
from pydantic import ValidationError

from fasttrain.data.caches import SmartCache, Window, open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import CacheSpec
from fasttrain.samples import Case

EXAMPLE = {"kind": "smart", "cache_cases": 4, "replace_rate": 0.25, "shuffle_seed": None}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ...]:
    return write_cases(tmp_path_factory.mktemp("set"), 5)


class Counting(Preprocess):
    """Notes which cases are preprocessed, and waits before each for as long as it is told to."""

    def __init__(self, cache: dict[str, Any], seconds: float = 0.0) -> None:
        super().__init__(make_recipe(**{**RECIPE.data.model_dump(), "cache": cache}, patch=RECIPE.patch.model_dump()))
        self.made: list[str] = []
        self.seconds = seconds

    def __call__(self, case: Case) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.made.append(case.name)
        return super().__call__(case)


def opened(cases: tuple[Case, ...], preprocess: Preprocess, epoch: int = 0) -> SmartCache:
    source = open_case_source("smart", cases, preprocess, 4, epoch=epoch)
    assert isinstance(source, SmartCache)
    return source


def monais_windows(items: int, epochs: int, **arguments: Any) -> list[list[int]]:
    """What MONAI's own class, started and updated as its documentation says, holds in each epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = SmartCacheDataset(data=list(range(items)), transform=lambda item: item, progress=False, **arguments)
    dataset.start()
    windows = []
    for epoch in range(epochs):
        if epoch:
            dataset.update_cache()
        windows.append([int(dataset[place]) for place in range(len(dataset))])
    dataset.shutdown()
    return windows


def test_monais_documented_example() -> None:
    window = Window(CacheSpec(**EXAMPLE), 5)
    images = [[f"image{index + 1}" for index in window.of(epoch)] for epoch in range(6)]
    assert images[0] == ["image1", "image2", "image3", "image4"]
    assert images[1] == ["image2", "image3", "image4", "image5"]
    assert images[2] == ["image3", "image4", "image5", "image1"]
    assert images[3] == ["image4", "image5", "image1", "image2"]
    assert images[5] == images[0]
    assert monais_windows(5, 6, cache_num=4, replace_rate=0.25, shuffle=False) == [
        list(window.of(epoch)) for epoch in range(6)
    ]


@settings(max_examples=12, deadline=None)
@given(
    items=st.integers(1, 12),
    share=st.floats(0.05, 1.0),
    rate=st.floats(0.01, 1.0),
    seed=st.none() | st.integers(0, 2**32 - 1),
)
def test_windows_are_those_of_monais_class(items: int, share: float, rate: float, seed: int | None) -> None:
    if int(items * share) == 0:
        share = 1.0  # MONAI would hold no case at all
    window = Window(CacheSpec(kind="smart", cache_share=share, replace_rate=rate, shuffle_seed=seed), items)
    shuffle = {"shuffle": False} if seed is None else {"shuffle": True, "seed": seed}
    theirs = monais_windows(items, 4, cache_rate=share, replace_rate=rate, **shuffle)
    assert [list(window.of(epoch)) for epoch in range(4)] == theirs


@given(items=st.integers(1, 40), share=st.floats(0.01, 1.0), rate=st.floats(0.01, 1.0), epoch=st.integers(0, 10**6))
def test_a_window_holds_each_case_once_and_all_come_round(items: int, share: float, rate: float, epoch: int) -> None:
    window = Window(CacheSpec(kind="smart", cache_share=share, replace_rate=rate), items)
    assert len(set(window.of(epoch))) == len(window.of(epoch)) == window.held >= 1
    seen = {index for later in range(epoch, epoch + items + 1) for index in window.of(later)}
    assert seen == set(range(items))


def test_windows_move_and_each_case_is_made_once_as_it_comes(cases: tuple[Case, ...]) -> None:
    preprocess = Counting({**EXAMPLE, "cache_cases": 2, "replace_rate": 0.5})
    source = opened(cases, preprocess)
    assert source.held == (0, 1)
    assert sorted(preprocess.made) == [cases[0].name, cases[1].name]
    for epoch in range(6):
        source.open_epoch(epoch)
        preprocess.made.clear()
        source.prepare_epoch(epoch + 1)
        for index in source.window.of(epoch):  # while the next one is made
            source[index]
        source.open_epoch(epoch + 1)
        assert preprocess.made == [cases[(epoch + 2) % 5].name]
        assert source.held == tuple(sorted(source.window.of(epoch + 1)))
    assert_true(source, cases, preprocess)
    source.close()


def test_a_resume_sees_the_windows_of_an_unbroken_run(cases: tuple[Case, ...]) -> None:
    unbroken = opened(cases, Counting(EXAMPLE))
    for epoch in range(4):
        unbroken.open_epoch(epoch)
        unbroken.prepare_epoch(epoch + 1)
    told = opened(cases, Counting(EXAMPLE), epoch=3)
    jumped = opened(cases, Counting(EXAMPLE))
    jumped.prepare_epoch(1)
    jumped.open_epoch(3)
    assert unbroken.held == told.held == jumped.held == tuple(sorted(unbroken.window.of(3)))
    for source in (unbroken, told, jumped):
        source.close()


def test_a_restart_within_an_epoch_keeps_what_was_prepared(cases: tuple[Case, ...]) -> None:
    preprocess = Counting(EXAMPLE)
    source = opened(cases, preprocess)
    source.open_epoch(0)
    source.prepare_epoch(1)
    source.open_epoch(0)
    preprocess.made.clear()
    source.open_epoch(1)
    assert preprocess.made == []
    source.close()


def test_no_thread_lives_while_workers_are_forked_nor_after_close(cases: tuple[Case, ...]) -> None:
    before = threading.active_count()
    source = opened(cases, Counting({**EXAMPLE, "cache_cases": 2, "replace_rate": 1.0}, seconds=0.15))
    source.prepare_epoch(1)
    assert threading.active_count() > before
    source.open_epoch(1)
    assert threading.active_count() == before
    source.prepare_epoch(2)
    began = time.perf_counter()
    source.close()
    assert time.perf_counter() - began < 0.5  # the case under way, not all of them
    assert threading.active_count() == before


def test_a_case_that_vanishes_is_named_when_its_epoch_opens(tmp_path: Path) -> None:
    cases = write_cases(tmp_path, 5)
    source = opened(cases, Counting({**EXAMPLE, "cache_cases": 2, "replace_rate": 1.0}))
    for case in (cases[2], cases[3]):
        case.images[0].unlink()
    source.prepare_epoch(1)
    with pytest.raises(DataError) as caught:
        source.open_epoch(1)
    assert len(caught.value.faults) == 2
    assert cases[2].images[0].name in caught.value.faults[0]
    source.close()


def test_all_faults_of_the_first_window_come_in_one_error(cases: tuple[Case, ...], tmp_path: Path) -> None:
    cut = tmp_path / "cut.nii"
    cut.write_bytes(cases[0].images[0].read_bytes()[:-40])
    preprocess = Counting(EXAMPLE)
    with pytest.raises(DataError) as caught:
        opened((Case("a", (cut,), None), Case("b", (cut,), None), *cases), preprocess)
    assert len(caught.value.faults) == 2
    assert sorted(preprocess.made) == ["a", "b", cases[0].name, cases[1].name]  # and no case outside the window is read


def test_a_forked_worker_reads_from_the_window_and_what_is_outside_is_right_too(cases: tuple[Case, ...]) -> None:
    preprocess = Counting(EXAMPLE)
    source = opened(cases, preprocess)
    source.open_epoch(1)
    preprocess.made.clear()
    for index in source.window.of(1):
        source[index]
    assert preprocess.made == []
    assert_same(source[0], preprocess.as_sample(preprocess(cases[0])))  # epoch 1 has it no longer
    child = os.fork()
    if child == 0:
        preprocess.made.clear()
        for index in source.window.of(1):
            source[index]
        os._exit(len(preprocess.made))
    assert os.waitpid(child, 0)[1] == 0
    source.close()


def test_a_window_as_large_as_the_set_stands_still(cases: tuple[Case, ...]) -> None:
    source = opened(cases, Counting({"kind": "smart", "cache_share": 1.0}))
    assert source.window.replaced == 0
    for epoch in range(3):
        source.open_epoch(epoch)
        source.prepare_epoch(epoch + 1)
        assert source.held == (0, 1, 2, 3, 4)
    source.close()


def test_what_the_recipe_refuses() -> None:
    assert Window(CacheSpec(kind="smart"), 10).held == 5
    assert Window(CacheSpec(kind="smart", cache_cases=99), 10).held == 10
    for wrong in ({"cache_share": 0.0}, {"cache_share": 1.5}, {"cache_cases": 0}, {"replace_rate": 0.0}):
        with pytest.raises(ValidationError):
            CacheSpec(kind="smart", **wrong)
    with pytest.raises(ValidationError, match="say the same thing twice"):
        CacheSpec(kind="smart", cache_share=0.5, cache_cases=2)
