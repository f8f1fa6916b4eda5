"""`data.label_map` and `data.ignore_label` on real files: what becomes of each value, what is refused, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.caches import open_case_source
from fasttrain.data.labels import faults_of_values
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.reading import read_image, read_label
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import IGNORED, Case

ONE = {1: "liver"}


def indices(path: Path, data: DataSpec) -> np.ndarray:
    case = Case("a", (path,), path)
    grid = read_image(case, data.model_copy(update={"nan_policy": "replace"}), 3)[1]
    return read_label(case, data, 3, grid)[0][0]


def fault(path: Path, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        indices(path, make_recipe(**data).data)
    (sentence,) = caught.value.faults
    return sentence


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    """A uint8 label of which half is 255."""
    values = np.zeros((8, 8, 8), np.uint8)
    values[:4] = 255
    return save(tmp_path / "mask.nii.gz", values)


def test_a_mask_of_0_and_255_is_refused_with_both_remedies(mask: Path) -> None:
    sentence = fault(mask, classes=ONE)
    assert sentence.startswith(
        f"{mask} has the undeclared label value 255 in 256 voxels; declared are 0 background, 1 liver"
    )
    assert "data.label_map: {255: 1}" in sentence
    assert "data.ignore_label: 255" in sentence


@pytest.mark.parametrize("remedy", [{"label_map": {255: 1}}, {"ignore_label": 255}])
def test_either_remedy_as_the_sentence_spells_it_mends_it(mask: Path, remedy: dict[str, Any]) -> None:
    half = indices(mask, make_recipe(classes=ONE, **remedy).data)
    assert np.array_equal(half, np.repeat(np.uint8([1 if "label_map" in remedy else IGNORED, 0]), 256).reshape(8, 8, 8))


def test_the_map_is_offered_only_where_it_can_be_right(tmp_path: Path) -> None:
    """With the class in the label, or several of them, 255 is no other name of it."""
    values = np.zeros((4, 4, 4), np.uint8)
    values[0], values[1] = 1, 255
    path = save(tmp_path / "l.nii", values)
    for classes in (ONE, {1: "liver", 2: "kidney"}):
        sentence = fault(path, classes=classes)
        assert "{255" not in sentence
        assert "map it to a declared value with data.label_map" in sentence
        assert "data.ignore_label: 255" in sentence
    assert "set data.ignore_label" not in fault(path, classes={2: "kidney"}, ignore_label=1)
    assert "2 kidney, 1 to be ignored" in fault(path, classes={2: "kidney"}, ignore_label=1)


def test_a_value_that_no_class_can_have_is_not_to_be_declared(tmp_path: Path) -> None:
    values = np.zeros((4, 4, 4), np.int16)
    values[0] = -1
    values[1], values[2] = 1, 2
    sentence = fault(save(tmp_path / "l.nii", values))
    assert "value -1 in 16 voxels" in sentence
    assert "data.classes" not in sentence
    assert "data.ignore_label: -1" in sentence


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i2", "<u2", "<i8", "<f4", ">f8"])
def test_values_of_every_type_are_mapped_and_ignored(tmp_path: Path, dtype: str) -> None:
    table = {"u1": [200, 255], "i1": [-100, -1]}.get(dtype, [1000, 2000])
    data = make_recipe(classes={1: "a", 2: "b", 4: "c"}, label_map={table[0]: 4}, ignore_label=table[1]).data
    stored = np.array([0, 1, 2, 4, *table] * 4).reshape(2, 3, 4)
    path = save(tmp_path / "l.nii", stored.astype(dtype))
    wanted = np.uint8([0, 1, 2, 3, 3, IGNORED] * 4).reshape(2, 3, 4)
    assert np.array_equal(indices(path, data), wanted)


def test_the_map_comes_after_rounding(tmp_path: Path) -> None:
    slope = float(np.float32(2 / 255))
    raw = np.rint(np.array([0, 1, 2]) / slope).astype(np.uint8).reshape(3, 1, 1)
    path = save(tmp_path / "l.nii", raw, scl_slope=slope)
    assert indices(path, make_recipe(classes=ONE, label_map={2: 1}, ignore_label=5).data).ravel().tolist() == [0, 1, 1]


def test_all_values_are_replaced_at_the_same_time(tmp_path: Path) -> None:
    path = save(tmp_path / "l.nii", np.uint8([0, 1, 2, 7]).reshape(4, 1, 1))
    swap = make_recipe(label_map={1: 2, 2: 1, 7: 9}, ignore_label=9).data
    assert indices(path, swap).ravel().tolist() == [0, 2, 1, IGNORED]
    inverted = make_recipe(classes=ONE, label_map={0: 1, 1: 0, 2: 0, 7: 0}).data
    assert indices(path, inverted).ravel().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("remedy", [{}, {"label_map": {255: 1}}, {"ignore_label": 255}, {"nan_policy": "replace"}])
def test_nan_in_a_label_is_always_refused(tmp_path: Path, remedy: dict[str, Any]) -> None:
    values = np.zeros((4, 4, 4), np.float32)
    values[3, 3, 3], values[0, 0, 0] = np.nan, np.inf
    assert "2 NaN or infinite voxels in a label" in fault(save(tmp_path / "l.nii", values), classes=ONE, **remedy)


@pytest.mark.parametrize("kind", ["memory", "disk", "lmdb"])
def test_a_class_in_five_voxels_of_the_seventh_of_ten_cases(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    cases = []
    for number in range(10):
        label = rng.integers(0, 4, (8, 8, 8)).astype(np.uint8)
        if number == 7:
            label[0, 0, :5] = 4
        image = save(tmp_path / f"i{number}.nii", rng.normal(size=(8, 8, 8)).astype(np.float32))
        cases.append(Case(f"case{number}", (image,), save(tmp_path / f"l{number}.nii", label)))
    recipe = make_recipe(classes={1: "a", 2: "b", 3: "c"}, patch={"size": [8, 8, 8]})
    with pytest.raises(DataError) as caught:
        open_case_source(kind, cases, Preprocess(recipe), 1)
    (sentence,) = caught.value.faults
    assert re.search(
        r"l7\.nii has the undeclared label value 4 in 5 voxels; declared are 0 background, 1 a, 2 b, 3 c", sentence
    )
    good = open_case_source(kind, [case for case in cases if case.name != "case7"], Preprocess(recipe), 1)
    assert len(good) == 9
    good.close()


@pytest.mark.parametrize("kind", ["none", "memory", "disk", "lmdb", "smart"])
def test_every_cache_gives_the_mapped_label_and_no_crop_is_centred_on_what_is_ignored(
    tmp_path: Path, kind: str
) -> None:
    label = np.zeros((10, 9, 8), np.uint8)
    label[:3], label[3:6], label[6:8] = 200, 255, 1
    image = np.random.default_rng(0).normal(size=label.shape).astype(np.float32)
    case = Case("a", (save(tmp_path / "i.nii", image),), save(tmp_path / "l.nii", label))
    settings = {"patch": {"size": [8, 8, 8], "background_above": -9.0}, "cache": {"kind": "smart", "cache_cases": 1}}
    for more, wanted in (
        ({"label_map": {200: 2}, "ignore_label": 255}, {200: 2, 255: IGNORED, 1: 1, 0: 0}),
        ({"label_map": {200: 0, 255: 1}}, {200: 0, 255: 1, 1: 1, 0: 0}),
    ):
        source = open_case_source(kind, [case], Preprocess(make_recipe(**settings, **more)), 1)
        sample = source[0]
        assert sample.label is not None
        assert sample.background_centres is not None
        table = np.zeros(256, np.uint8)
        table[list(wanted)] = list(wanted.values())
        assert torch.equal(sample.label[0], torch.from_numpy(table[label]))
        flat = sample.label.flatten()
        for index, centres in enumerate(sample.centres, start=1):
            assert (flat[centres.long()] == index).all()
            assert len(centres) == (flat == index).sum()
        assert (flat[sample.background_centres.long()] == 0).all()
        assert len(sample.background_centres) == (flat == 0).sum()
        source.close()


def test_ignored_voxels_stay_so_through_resampling_and_orientation(tmp_path: Path) -> None:
    label = np.zeros((12, 10, 8), np.uint8)
    label[3:9, 2:8, 2:6], label[5:7, 4:6, 3:5] = 9, 1
    affine = np.diag([-1.0, 1.0, 2.0, 1.0])
    image = save(tmp_path / "i.nii", label.astype(np.float32), affine)
    case = Case("a", (image,), save(tmp_path / "l.nii", label, affine))
    recipe = make_recipe(spacing=[1.0, 1.0, 1.0], ignore_label=9, patch={"size": [8, 8, 8]})
    sample = Preprocess(recipe, training=False).as_sample(Preprocess(recipe, training=False)(case))
    assert sample.label is not None
    assert set(sample.label.unique().tolist()) == {0, 1, IGNORED}
    assert (sample.label == IGNORED).sum() == pytest.approx(2 * (label == 9).sum(), rel=0.3)


# --- the table by itself --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    values=st.sets(st.integers(-3, 12) | st.sampled_from([255, 300, 2**40]), min_size=1),
    mapping=st.dictionaries(st.integers(-3, 12) | st.just(300), st.sampled_from([0, 2, 5, 7]), max_size=4),
    ignore=st.sampled_from([None, 7, 300, -2]),
)
def test_a_table_has_a_fault_where_the_definition_says_so(values: set[int], mapping: dict[int, int], ignore) -> None:
    """Against the contract, value by value; the recipe's own checks are not asked."""
    data = make_recipe(classes={2: "a", 5: "b"}).data.model_copy(update={"label_map": mapping, "ignore_label": ignore})
    found = np.array(sorted(values))
    counts = np.arange(1, len(found) + 1)
    strange = [
        f"{value} in {count} voxel{'s' if count > 1 else ''}"
        for value, count in zip(found.tolist(), counts.tolist(), strict=True)
        if mapping.get(value, value) not in (0, 2, 5) and mapping.get(value, value) != ignore
    ]
    faults = faults_of_values(Path("l.nii"), found, counts, data)
    assert len(faults) == bool(strange)
    assert faults_of_values(Path("l.nii"), found.astype(np.float64), counts, data) == faults
    if faults:
        listed = faults[0].split("label value")[1].split(";")[0].removeprefix("s").strip()
        more = [f"{len(strange) - 8} more value{'s' if len(strange) > 9 else ''}"] if len(strange) > 8 else []
        assert listed == ", ".join(strange[:8] + more)
