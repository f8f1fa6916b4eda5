"""The check and the reading that training does, case by case: what the one refuses the other must not pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checking_sets import SHAPE, check, classes, found, make_set, noise, put
from data_builders import make_recipe, save

from fasttrain.data.caches import estimate_bytes
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError, RecipeError

Spoil = Callable[[Path], None]


def image_of(values: np.ndarray, **more: Any) -> Spoil:
    return lambda root: put(root, "c1", values, classes(values.shape[:3]), **more)


def label_of(values: np.ndarray, affine: np.ndarray | None = None) -> Spoil:
    return lambda root: put(root, "c1", noise(1), values, label_affine=affine)


def with_voxel(values: np.ndarray, value: float) -> np.ndarray:
    values = values.copy()
    values[3, 3, 3] = value
    return values


def cut(part: str) -> Spoil:
    def spoil(root: Path) -> None:
        path = root / part / "c1.nii.gz"
        path.write_bytes(path.read_bytes()[:-40])

    return spoil


def scaled_far(root: Path) -> None:
    # In the header's scaling, of 32-bit integers
    values = np.arange(960, dtype=np.int32).reshape(SHAPE)
    put(root, "c1", values, classes(), scl_slope=0.5, scl_inter=3e9)


FAR = np.random.default_rng(0).normal(size=SHAPE) * 300
MOVED = np.array([[1.0, 0, 0, 2], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
HALF = classes().astype(np.float32)
HALF[0, 0, 0] = 0.5

REFUSED: dict[str, tuple[Spoil, dict[str, Any]]] = {
    "cut short": (cut("imagesTr"), {}),
    "label cut short": (cut("labelsTr"), {}),
    "float64 far from zero": (image_of(FAR + 1e9), {}),
    "float64 far from zero beside NaN": (image_of(with_voxel(FAR + 1e9, np.nan)), {"nan_policy": "replace"}),
    "int64 far from zero": (image_of(np.arange(960).reshape(SHAPE) * 1000 + 10**12), {}),
    "scaled far from zero": (scaled_far, {}),
    "NaN": (image_of(with_voxel(noise(1), np.nan)), {}),
    "infinite": (image_of(with_voxel(noise(1), -np.inf)), {}),
    "beyond float32": (image_of(with_voxel(noise(1).astype(np.float64), 1e300)), {}),
    "nothing finite": (image_of(np.full(SHAPE, np.nan, np.float32)), {"nan_policy": "replace"}),
    "beyond float16": (image_of(noise(1) * 1e6), {"storage_dtype": "float16"}),
    "two channels": (image_of(np.stack([noise(1), noise(2)], axis=-1)), {}),
    "five axes": (image_of(np.ones((*SHAPE, 2, 3), np.float32) * noise(1)[..., None, None]), {}),
    "a plane": (lambda root: put(root, "c1", noise(1)[..., 0], classes()[..., 0]), {}),
    "other shape of the label": (label_of(classes((12, 10, 9))), {}),
    "axes of the label swapped": (label_of(np.ascontiguousarray(classes().transpose(2, 1, 0))), {}),
    "label elsewhere": (label_of(classes(), MOVED), {}),
    "undeclared": (label_of(with_voxel(classes(), 9)), {}),
    "undeclared and huge": (label_of(with_voxel(classes().astype(np.uint64), 2**64 - 1)), {}),
    "undeclared and far below zero": (label_of(with_voxel(classes().astype(np.int64), -(2**63))), {}),
    "label not whole": (label_of(HALF), {}),
    "label with NaN": (label_of(with_voxel(classes().astype(np.float32), np.nan)), {}),
    "one-hot label": (label_of(np.stack([classes() == one for one in range(3)], axis=-1).astype(np.uint8)), {}),
}

PASSED: dict[str, tuple[Spoil, dict[str, Any]]] = {
    "as it is": (lambda root: None, {}),
    "NaN that is filled": (image_of(with_voxel(noise(1), np.nan)), {"nan_policy": "replace"}),
    "float32 far from zero": (image_of((FAR + 1e9).astype(np.float32)), {}),
    "big-endian float32 far from zero": (image_of((FAR + 1e9).astype(">f4")), {}),
    "float64 at home": (image_of(FAR), {}),
    "wide range of int64": (image_of(np.arange(960).reshape(SHAPE) * 10**10), {}),
    "windowed into float16": (
        image_of(noise(1) * 1e6),
        {"storage_dtype": "float16", "intensity": {"kind": "window", "low": -1.0, "high": 1.0}},
    ),
    "z-scored into float16": (image_of(noise(1) * 1e6), {"storage_dtype": "float16", "intensity": {"kind": "zscore"}}),
    "label within a tenth of a voxel": (label_of(classes(), MOVED - np.array([[0, 0, 0, 1.95]] + [[0] * 4] * 3)), {}),
    "label with a trailing axis": (label_of(classes()[..., None]), {}),
    "resampled": (lambda root: None, {"spacing": [0.7, 1.3, 2.0]}),
}


def trained_on(root: Path, data: dict[str, Any]) -> str | None:
    """What reading, preprocessing or the estimate says against case c1."""
    recipe = make_recipe(**data)
    case = found(check(root, root.parent / "cache", **data))["c1"].case
    try:
        estimate_bytes([case], recipe)
        Preprocess(recipe)(case)
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_training_refuses_the_check_refuses(name: str, tmp_path: Path) -> None:
    root, (spoil, data) = make_set(tmp_path / "set"), REFUSED[name]
    spoil(root)
    assert trained_on(root, data) is not None
    checked = check(root, tmp_path / "cache", **data)
    assert list(checked.bad) == ["c1"]
    assert all("c1" in fault and "c0" not in fault for fault in checked.faults)


@pytest.mark.parametrize("name", PASSED)
def test_what_training_takes_the_check_passes(name: str, tmp_path: Path) -> None:
    root, (spoil, data) = make_set(tmp_path / "set"), PASSED[name]
    spoil(root)
    assert trained_on(root, data) is None
    assert check(root, tmp_path / "cache", **data).faults == ()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_constant_but_for_what_is_filled(value: float, tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put(root, "c1", with_voxel(np.full(SHAPE, 7, np.float32), value), classes())
    checked = check(root, tmp_path / "cache", nan_policy="replace")
    assert list(checked.bad) == ["c1"]
    assert "every voxel of channel CT is 7, but for 1 NaN or infinite ones" in checked.faults[0]


def test_a_float64_image_that_is_constant_as_float32_is_told_so(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put(root, "c1", 1e9 + noise(1).astype(np.float64), classes())
    assert "is 1e+09 as float32; subtract an offset" in check(root, tmp_path / "cache").faults[0]


@pytest.mark.parametrize("value", [2**64 - 1, 2**40])
def test_no_remedy_names_a_value_that_no_recipe_holds(value: int, tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put(root, "c1", noise(1), np.where(classes() == 1, value, 0).astype(np.uint64))
    for declared in ({1: "organ"}, {1: "liver", 2: "kidney"}):
        fault = found(check(root, tmp_path / "cache", classes=declared))["c1"].faults[0]
        assert "label_map" not in fault
        assert "ignore_label" not in fault
        assert "mend the label" in fault


def spaced(millimetres: float) -> np.ndarray:
    return np.diag([millimetres] * 3 + [1.0])


def put_spaced(root: Path, name: str, millimetres: float) -> None:
    affine = spaced(millimetres)
    put(root, name, noise(int(name[1:])), classes(), image_affine=affine, label_affine=affine)


def test_one_spacing_that_no_memory_holds_is_the_case_s_fault(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put_spaced(root, "c1", 1000.0)
    checked = check(root, tmp_path / "cache", spacing=[1.0, 1.0, 1.0])
    assert list(checked.bad) == ["c1"]
    assert "has a spacing of 1000×1000×1000 mm" in checked.faults[0]
    assert "mend the spacing in its header, or leave the case out with data.bad_cases: skip" in checked.faults[0]
    assert check(root, tmp_path / "cache", spacing=None).faults == ()


def test_a_spacing_far_from_that_of_the_others_is_a_warning(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put_spaced(root, "c1", 8.0)
    checked = check(root, tmp_path / "cache", spacing=[1.0, 1.0, 1.0], patch={"size": [8, 8, 8]})
    assert checked.faults == ()
    assert [text for text in checked.warnings if "times those of the median case" in text and "case c1" in text]
    put_spaced(root, "c1", 2.0)
    assert check(root, tmp_path / "cache", spacing=[1.0, 1.0, 1.0], patch={"size": [8, 8, 8]}).warnings == ()


def test_a_spacing_that_makes_too_much_of_every_case_is_the_recipe_s(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    with pytest.raises(RecipeError, match="makes .* voxels of .*all cases are so: set a coarser data.spacing"):
        check(root, tmp_path / "cache", spacing=[1e-6] * 3)


def test_labels_of_ignored_voxels_alone_are_told_by_part(tmp_path: Path) -> None:
    root, ignored = make_set(tmp_path / "set", 4), np.full(SHAPE, 255, np.uint8)
    for name in ("c1", "c3"):
        save(root / f"labelsTr/{name}.nii.gz", ignored)
    checked = check(root, tmp_path / "cache", ignore_label=255)
    assert checked.faults == ()
    told = "\n".join(checked.warnings)
    assert "the label of case c1 holds nothing but ignored voxels; nothing is learnt from it" in told
    assert "the label of case c3 holds nothing but ignored voxels; no score is had from it" in told
    assert "no validation case has a voxel that is scored" in told
    assert "background" not in told
