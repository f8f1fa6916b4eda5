"""`data.label_map` and `data.ignore_label`: what they may say, and the sentence for what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve
from fasttrain.recipe.reference import sections


def faults(**data: object) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        resolve("spleen", sets(**data))
    return caught.value.faults


def sets(**data: object) -> dict[str, object]:
    return {f"data.{key}": value for key, value in data.items()}


TWO = {1: "a", 2: "b"}


@pytest.mark.parametrize(
    "data",
    [
        {"label_map": {255: 1}},
        {"label_map": {-1: 0, 1000: 1, 2: 1}},
        {"ignore_label": 255},
        {"ignore_label": -1},
        {"label_map": {254: 255}, "ignore_label": 255},  # several values that are left out
        {"classes": TWO, "label_map": {1: 2, 2: 1}},  # a swap: each value is replaced once
        {"classes": TWO, "label_map": {3: 1, 1: 2}},  # a shift
        {"classes": TWO, "label_map": {1: 1, 7: 1}},  # itself
        {"label_map": {0: 1, 255: 0}},  # an inverted mask
        {"classes": {value: f"c{value}" for value in range(1, 255)}, "ignore_label": 255},
        {"classes": {value: f"c{value}" for value in range(1, 256)}},
    ],
)
def test_what_is_allowed(data: dict[str, object]) -> None:
    recipe = resolve("spleen", sets(**data)).recipe
    assert recipe.data.label_map == data.get("label_map", {})
    assert recipe.data.ignore_label == data.get("ignore_label")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"label_map": {255: 2}},
            "data.label_map[255]: maps to 2, which is neither 0, nor one of data.classes, nor data.ignore",
        ),
        ({"label_map": {3: 255}}, "data.label_map[3]: maps to 255, which is neither"),
        ({"classes": TWO, "label_map": {1: 2}}, "nothing becomes 1, so class 1 (a) could never occur"),
        ({"classes": TWO, "label_map": {1: 2, 2: 0}}, "data.label_map[1]: makes 2 of every 1 and nothing becomes 1"),
        ({"label_map": {0: 1}}, "data.label_map[0]: makes 1 of every 0 and nothing becomes 0, so the background"),
        ({"label_map": {10**10: 1}}, "label values lie between -1,000,000,000 and 1,000,000,000"),
        ({"ignore_label": 0}, "data.ignore_label: 0 is the background, which is trained and scored"),
        ({"ignore_label": 1}, "data.ignore_label: 1 is the class spleen; take it out of data.classes"),
        ({"label_map": {255: 1}, "ignore_label": 255}, "data.ignore_label: data.label_map replaces 255 by 1 before"),
        ({"ignore_label": 10**10}, "label values lie between"),
        ({"ignore_label": 1.5}, "data.ignore_label: should be a valid integer"),
        ({"ignore_label": True}, "data.ignore_label: should be a number, found true"),
        ({"label_map": {"x": 1}}, "data.label_map.x: should be a valid integer"),
        ({"label_map": {255: True}}, "data.label_map[255]: should be a number, found true"),
        (
            {"classes": {value: f"c{value}" for value in range(1, 256)}, "ignore_label": 300},
            "data.ignore_label: leaves room for 254 classes, but data.classes has 255",
        ),
    ],
)
def test_what_is_refused(data: dict[str, object], sentence: str) -> None:
    (fault,) = faults(**data)
    assert sentence in fault


def test_all_faults_at_once() -> None:
    assert len(faults(label_map={5: 7, 6: 8}, ignore_label=0)) == 3


def test_a_child_recipe_replaces_the_map_whole(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("extends: spleen\ndata: {label_map: {255: 1}}\n")
    shown = resolve(str(tmp_path / "parent.yaml")).recipe.data
    assert shown.label_map == {255: 1}
    flat = {"data.label_map": {7: 1}}
    assert resolve(str(tmp_path / "parent.yaml"), flat).recipe.data.label_map == {7: 1}
    assert resolve(str(tmp_path / "parent.yaml"), {"data.label_map.7": 1}).recipe.data.label_map == {255: 1, 7: 1}


def test_a_fault_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: spleen\ndata:\n  label_map:\n    255: 1\n    7: 9\n")
    with pytest.raises(RecipeError) as caught:
        resolve(str(path))
    assert caught.value.faults[0].startswith(f"{path}:5: data.label_map[7]: maps to 9")


@settings(max_examples=50, deadline=None)
@given(
    table=st.dictionaries(st.integers(-300, 300), st.integers(0, 3), max_size=6),
    ignore=st.none() | st.integers(-300, 300),
)
def test_a_recipe_that_is_taken_reads_back(tmp_path_factory: pytest.TempPathFactory, table, ignore) -> None:
    try:
        resolved = resolve("spleen", sets(classes={1: "a", 2: "b", 3: "c"}, label_map=table, ignore_label=ignore))
    except RecipeError:
        return
    path = tmp_path_factory.mktemp("r") / "recipe.yaml"
    path.write_text(resolved.as_yaml())
    again = resolve(str(path)).recipe.data
    assert (again.label_map, again.ignore_label) == (table, ignore)


def test_the_keys_are_listed() -> None:
    keys = {key.path: key for key in sections("data")[0].keys}
    assert (keys["data.label_map"].takes, keys["data.label_map"].default) == ("whole number: whole number, …", "{}")
    assert (keys["data.ignore_label"].takes, keys["data.ignore_label"].default) == ("whole number | null", "null")
