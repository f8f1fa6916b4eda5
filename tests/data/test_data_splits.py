"""Splits give the folds nnU-Net draws, disjoint parts, and one error with every wrong name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_builders import make_recipe
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.data.splits import Split, fold_indices, split_cases
from fasttrain.errors import RecipeError
from fasttrain.samples import Case


def cases(count: int) -> list[Case]:
    return [Case(f"case_{index:03d}", (Path(f"{index}.nii"),), Path(f"{index}_l.nii")) for index in range(count)]


def split(count: int, **spec: Any) -> Split:
    return split_cases(cases(count)[::-1], make_recipe(split=spec).data.split)


def names(part: tuple[Case, ...]) -> list[str]:
    return [case.name for case in part]


def fault(count: int, **spec: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        split(count, **spec)
    return str(caught.value)


def test_folds_are_those_of_nnunet(real_data: Callable[[str], Path]) -> None:
    root = real_data("hippocampus")
    ids = [Path(entry["image"]).name[:-7] for entry in json.loads((root / "dataset.json").read_text())["training"]]
    found = [Case(name, (Path(name),), Path(name)) for name in reversed(ids)]
    expected = json.loads((root / "folds.json").read_text())
    assert len(expected) == 5
    for number, fold in enumerate(expected):
        parts = split_cases(found, make_recipe(split={"kind": "kfold", "fold": number}).data.split)
        assert names(parts.train) == sorted(fold["train"])
        assert names(parts.validation) == sorted(fold["validation"])


def test_folds_of_known_values() -> None:
    """RandomState(0) shuffles 0 … 6 to 6 2 1 3 0 5 4, which is cut into runs of 3, 2 and 2."""
    assert [fold_indices(7, 3, fold, 0).tolist() for fold in range(3)] == [[1, 2, 6], [0, 3], [4, 5]]


@given(count=st.integers(2, 60), folds=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_folds_part_all_cases(count: int, folds: int, seed: int, data: st.DataObject) -> None:
    test = data.draw(st.lists(st.sampled_from(names(tuple(cases(count)))), unique=True, max_size=count))
    left = count - len(test)
    spec: dict[str, Any] = {"kind": "kfold", "folds": folds, "seed": seed, "test": test}
    if left < folds:
        assert "data.split.folds" in fault(count, **spec)
        return
    seen: list[str] = []
    for number in range(folds):
        parts = split(count, **spec, fold=number)
        assert sorted([*names(parts.train), *names(parts.validation), *test]) == names(tuple(cases(count)))
        assert names(parts.test) == sorted(test)
        assert names(parts.train) == sorted(names(parts.train))
        seen += names(parts.validation)
    assert sorted([*seen, *test]) == names(tuple(cases(count)))


def test_last_takes_the_end() -> None:
    parts = split(10, kind="last", validation=2, test=3)
    assert names(parts.train) == [f"case_{n:03d}" for n in range(5)]
    assert names(parts.test) == ["case_005", "case_006", "case_007"]
    assert names(parts.validation) == ["case_008", "case_009"]
    assert "only 5 were found" in fault(5, kind="last", validation=2, test=3)


@given(count=st.integers(1, 50), validation=st.floats(0.01, 0.99), test=st.sampled_from([0.0, 0.1, 0.5]))
def test_ratio_parts_all_cases(count: int, validation: float, test: float) -> None:
    spec: dict[str, Any] = {"kind": "ratio", "validation": validation, "test": test}
    held = max(1, round(validation * count)) + (max(1, round(test * count)) if test else 0)
    if held >= count:
        assert "leaves none to train" in fault(count, **spec)
        return
    parts = split(count, **spec)
    every = [*names(parts.train), *names(parts.validation), *names(parts.test)]
    assert sorted(every) == names(tuple(cases(count)))
    assert len(parts.validation) == max(1, round(validation * count))
    assert bool(parts.test) == bool(test)
    assert names(split(count, **spec).validation) == names(parts.validation)


def test_ratio_depends_on_the_seed() -> None:
    first, second = (names(split(40, kind="ratio", seed=seed).validation) for seed in (0, 1))
    assert first != second
    assert first != names(tuple(cases(40)[:8]))


def test_lists_are_taken_as_written() -> None:
    parts = split(5, kind="lists", train=["case_004", "case_000"], validation=["case_002"], test=["case_001"])
    assert names(parts.train) == ["case_000", "case_004"]
    assert names(parts.validation) == ["case_002"]
    assert names(parts.test) == ["case_001"]


def test_list_faults_come_together() -> None:
    text = fault(
        30,
        kind="lists",
        train=["case_001", "case_01O", "case_002", "case_002"],
        validation=["case_001", "unlike anything"],
    ).splitlines()
    assert len(text) == 4
    assert text[0].startswith("data.split.train[1]: no case is called case_01O")
    assert "case_01" in text[0].split("mean")[1]
    assert "data.split.validation[1]: no case is called unlike anything; there are 30 cases" in text[1]
    assert "case case_001 stands in train, validation" in text[2]
    assert "case case_002 stands in train ×2" in text[3]
    assert "data.split.test[0]" in fault(9, kind="kfold", test=["nobody"])


def test_empty_parts_are_refused() -> None:
    assert "no case for training of 3" in fault(3, kind="lists", train=[], validation=["case_001"])
    assert "training and none for validation" in fault(3, kind="lists", train=[], validation=[])
    assert "folds is 5, but there are only 4" in fault(4, kind="kfold")


def test_same_trains_and_validates_on_every_case_even_on_one() -> None:
    for count in (1, 3):
        parts = split(count, kind="same")
        assert names(parts.train) == names(parts.validation) == [case.name for case in cases(count)]
        assert parts.test == ()
    assert "leaves no case" in fault(0, kind="same")
