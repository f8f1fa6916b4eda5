"""The check of every case: each fault by file, value and remedy, and beside it the sound input that looks like one."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from checking_sets import SHAPE, check, classes, found, listed, make_set, noise, put
from data_builders import save

from fasttrain.data.checking import without_bad_cases
from fasttrain.data.splits import split_cases
from fasttrain.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set")


def only_fault(root: Path, tmp_path: Path, **data: Any) -> str:
    checked = check(root, tmp_path / "cache", **data)
    assert len(checked.faults) == 1, checked.faults
    return checked.faults[0]


def assert_sound(root: Path, tmp_path: Path, **data: Any) -> None:
    checked = check(root, tmp_path / "cache", **data)
    assert (checked.faults, checked.warnings) == ((), ())


def test_a_sound_set_has_neither_faults_nor_warnings(root: Path, tmp_path: Path) -> None:
    checked = check(root, tmp_path / "cache")
    assert (checked.faults, checked.warnings) == ((), ())
    case = found(checked)["c0"]
    assert case.voxels == {0: 640, 1: 160, 2: 160}
    assert (case.spacing, case.orientation, case.dtypes, case.label_dtype) == ((1, 1, 1), "RAS", ("float32",), "uint8")
    assert case.minimum == pytest.approx(noise(0).min())
    assert case.maximum == pytest.approx(noise(0).max())


def test_shapes_that_differ_are_both_told(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    put(root, "c1", noise(1, (48, 48, 33)), classes((48, 48, 48)))
    fault = only_fault(root, tmp_path)
    assert "labelsTr/c1.nii.gz has the shape 48×48×48, but" in fault
    assert "imagesTr/c1.nii.gz has 48×48×33" in fault


@pytest.mark.parametrize("size", [[16, 16, 16], [16, 16]])
def test_the_same_sizes_in_another_order_are_hinted_at(size: list[int], tmp_path: Path) -> None:
    root = tmp_path / "set"
    shape = (43, 63, 1)
    for number in range(2):
        put(root, f"c{number}", noise(number, shape), classes(shape))
    put(root, "c2", noise(3, shape), classes(shape).reshape(1, 43, 63))
    faults = found(check(root, tmp_path / "cache", patch={"size": size}))["c2"].faults
    hinted = [fault for fault in faults if "the same sizes in another order" in fault]
    assert len(hinted) == 1, faults
    assert "1×43×63" in hinted[0]
    assert "43×63×1" in hinted[0]


def test_an_undeclared_value_is_told_with_its_voxels(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", 10)
    label = classes()
    label[8, 0, :5] = 4
    put(root, "c7", noise(7), label)
    fault = only_fault(root, tmp_path)
    assert "labelsTr/c7.nii.gz" in fault
    assert "4 in 5 voxels" in fault


def test_a_declared_4_is_sound(root: Path, tmp_path: Path) -> None:
    label = classes()
    label[8, 0, :5] = 4
    put(root, "c1", noise(1), label)
    assert_sound(root, tmp_path, classes={1: "a", 2: "b", 4: "c"})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_voxel_that_is_no_number_is_told_and_may_be_replaced(value: float, tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    image = noise(1, (48, 48, 48))
    image[3, 3, 3] = value
    put(root, "c1", image, classes(image.shape))
    fault = only_fault(root, tmp_path)
    assert ("1 NaN and 0" if np.isnan(value) else "0 NaN and 1") in fault
    assert "data.nan_policy: replace" in fault
    assert_sound(root, tmp_path, nan_policy="replace")


@pytest.mark.parametrize("policy", ["refuse", "replace"])
def test_nan_in_a_label_is_always_refused(policy: str, root: Path, tmp_path: Path) -> None:
    label = classes().astype(np.float32)
    label[0, 0, 0] = np.nan
    put(root, "c1", noise(1), label)
    assert "1 NaN" in only_fault(root, tmp_path, nan_policy=policy)


def test_an_image_without_a_finite_voxel_is_refused_however_it_is_filled(root: Path, tmp_path: Path) -> None:
    put(root, "c1", np.full(SHAPE, np.nan, np.float32), classes())
    assert "no finite voxel" in only_fault(root, tmp_path, nan_policy="replace")


def test_a_label_off_whole_numbers(root: Path, tmp_path: Path) -> None:
    label = classes().astype(np.float32)
    label[0, 0, :3] = 0.5
    put(root, "c1", noise(1), label)
    fault = only_fault(root, tmp_path)
    assert "3 label voxels" in fault
    assert "0.5" in fault


def test_whole_numbers_within_rounding_are_sound(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1), classes().astype(np.float64) * 0.9999999)
    assert_sound(root, tmp_path)


def test_an_image_in_the_place_of_a_label(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1), np.arange(960, dtype=np.int16).reshape(SHAPE))
    assert "more than 300 distinct values, which are no class values" in only_fault(root, tmp_path)


@pytest.mark.parametrize("fill", [0.0, 7.5])
def test_a_constant_image_is_refused_by_its_value(fill: float, root: Path, tmp_path: Path) -> None:
    put(root, "c1", np.full(SHAPE, fill, np.float32), classes())
    assert f"every voxel of channel CT is {fill:g}" in only_fault(root, tmp_path)


def test_affines_that_disagree_in_mm_and_voxels(root: Path, tmp_path: Path) -> None:
    spaced = np.diag([2.0, 2.0, 2.0, 1.0])
    moved = spaced.copy()
    moved[0, 3] = 3.0
    put(root, "c1", noise(1), classes(), image_affine=spaced, label_affine=moved)
    fault = only_fault(root, tmp_path)
    assert "3 mm" in fault
    assert "1.5 voxels" in fault


@pytest.mark.parametrize("kind", ["flipped", "noise"])
def test_affines_that_agree_in_the_world_are_sound(kind: str, root: Path, tmp_path: Path) -> None:
    affine, label = np.eye(4), classes()
    if kind == "flipped":
        affine[0, 0], affine[0, 3], label = -1.0, SHAPE[0] - 1, label[::-1]
    else:
        affine = affine + np.random.default_rng(0).normal(size=(4, 4)) * 1e-8 * (np.arange(4) < 3)[:, None]
    put(root, "c1", noise(1), label, label_affine=affine)
    assert_sound(root, tmp_path)


def test_damaged_files_are_all_in_one_report_and_can_be_left_out(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", 8)
    images = [root / "imagesTr" / f"c{number}.nii.gz" for number in range(8)]
    for number in range(5):
        put(root, f"c{number}", noise(number, (32, 32, 32)), classes((32, 32, 32)))
    whole = [path.read_bytes() for path in images]
    plain = gzip.decompress(whole[4])
    images[0].write_bytes(whole[0][: len(whole[0]) // 2])
    flipped = bytearray(whole[1])
    flipped[len(flipped) // 2] ^= 1
    images[1].write_bytes(bytes(flipped))
    images[2].write_bytes(b"")
    images[3].write_bytes(gzip.decompress(whole[3]))
    (root / "imagesTr/c4.nii").write_bytes(plain[: len(plain) // 2])
    listed(root, "c4", "imagesTr/c4.nii")
    checked = check(root, tmp_path / "cache")
    assert list(checked.bad) == ["c0", "c1", "c2", "c3", "c4"]
    told = [faults[0] for faults in checked.bad.values()]
    words = ["end too early", "gzip says", "0 bytes", "holds plain NIfTI", "cut short"]
    assert all(word in fault for word, fault in zip(words, told, strict=True)), told
    split = split_cases([case.case for case in checked.cases], checked.terms.data.split)
    with pytest.raises(DataError) as refused:
        without_bad_cases(checked, split)
    assert refused.value.faults == checked.faults
    skipping = check(root, tmp_path / "cache", bad_cases="skip")
    left = without_bad_cases(skipping, split)
    assert [case.name for case in left.train] == ["c5", "c6"]
    assert [case.name for case in left.validation] == ["c7"]


def test_leaving_out_the_last_case_of_a_part_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "imagesTr/c2.nii.gz").write_bytes(b"")
    checked = check(root, tmp_path / "cache", bad_cases="skip")
    split = split_cases([case.case for case in checked.cases], checked.terms.data.split)
    with pytest.raises(DataError, match="leaves no validation case"):
        without_bad_cases(checked, split)


@pytest.mark.parametrize("dtype", ["rgb", "complex"])
def test_colour_and_complex_images_are_named(dtype: str, root: Path, tmp_path: Path) -> None:
    rgb = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    put(root, "c1", np.zeros(SHAPE, rgb) if dtype == "rgb" else noise(1).astype(np.complex64), classes())
    assert dtype in only_fault(root, tmp_path).lower()


FOUR = {"channels": ["a", "b", "c", "d"]}


def four_channels(count: int = 4) -> np.ndarray:
    shape = (24, 24, 16, count)
    return np.stack([noise(index, shape[:3]) + 100 * index for index in range(count)], axis=-1)


def test_channels_are_looked_at_one_by_one(tmp_path: Path) -> None:
    root, label = tmp_path / "set", classes((24, 24, 16))
    for number in range(3):
        put(root, f"c{number}", four_channels() + np.float32(number), label)
    assert_sound(root, tmp_path, **FOUR)
    image = four_channels()
    image[..., 2] = 5
    image[0, 0, 0, 3] = np.nan
    put(root, "c1", image, label)
    faults = check(root, tmp_path / "cache", **FOUR).faults
    assert len(faults) == 2
    assert "channel c is 5" in faults[0]
    assert "1 NaN and 0 infinite voxels in channel d" in faults[1]


def test_ten_volumes_with_four_channels_declared(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for number in range(3):
        put(root, f"c{number}", four_channels(10 if number == 1 else 4) + np.float32(number), classes((24, 24, 16)))
    fault = only_fault(root, tmp_path, **FOUR)
    assert "10 channels" in fault
    assert "data.channels names 4" in fault


def test_a_label_with_a_fourth_axis_is_one_hot(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1), np.stack([classes() == value for value in range(4)], axis=-1).astype(np.uint8))
    assert "one-hot" in only_fault(root, tmp_path)


def test_a_trailing_axis_of_one_is_sound(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1)[..., None], classes()[..., None])
    assert_sound(root, tmp_path)


def test_a_single_slice_needs_a_plane_patch(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for number in range(3):
        put(root, f"c{number}", noise(number, (40, 30, 1)), classes((40, 30, 1)))
    faults = check(root, tmp_path / "cache").faults
    assert len(faults) == 3
    assert all("a single slice, but patch.size is 16×16×16; give patch.size two values" in fault for fault in faults)
    assert_sound(root, tmp_path, patch={"size": [16, 16]})


def test_a_class_that_resampling_loses_is_a_warning(root: Path, tmp_path: Path) -> None:
    label = np.where(classes() == 2, 0, classes()).astype(np.uint8)
    label[5, 5, 5] = 2
    put(root, "c1", noise(1), label)
    lost = check(root, tmp_path / "cache", spacing=[2.0, 2.0, 2.0])
    assert lost.faults == ()
    assert len(lost.warnings) == 1
    assert "case c1: class kidney (2) has 1 voxel" in lost.warnings[0]
    assert "none once it is resampled to data.spacing 2×2×2 mm" in lost.warnings[0]
    assert_sound(root, tmp_path, spacing=[1.0, 1.0, 1.0])
    assert_sound(root, tmp_path, spacing=[0.5, 0.5, 0.5])


def test_what_resampling_keeps_is_what_preprocessing_keeps(root: Path, tmp_path: Path) -> None:
    """A voxel of a class of its own at every second place, in a file whose axes are turned and swapped."""
    from data_builders import make_recipe

    from fasttrain.data.preprocess import Preprocess

    affine = np.array([[0, -1.0, 0, 20], [1.5, 0, 0, 0], [0, 0, -2.0, 5], [0, 0, 0, 1]])
    label = np.zeros(SHAPE, np.uint8)
    values = {}
    for number, place in enumerate([(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 5, 7), (11, 9, 7), (7, 4, 3), (10, 9, 6)], 1):
        label[place] = number
        values[number] = f"class {number}"
    put(root, "c1", noise(1), label, image_affine=affine, label_affine=affine)
    data = {"spacing": [2.3, 3.1, 2.9], "classes": values}
    checked = check(root, tmp_path / "cache", **data)
    case = found(checked)["c1"].case
    kept = set(np.unique(Preprocess(make_recipe(**data))(case)["label"].numpy()).tolist()) - {0}
    lost = {
        value for value in values if any(f"class {value} ({value})" in text for text in found(checked)["c1"].warnings)
    }
    assert lost == set(values) - kept
    assert lost
    assert kept


def test_an_empty_label_is_one_line_and_no_fault(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1), np.zeros(SHAPE, np.uint8))
    checked = check(root, tmp_path / "cache")
    assert checked.faults == ()
    assert len(checked.warnings) == 1
    assert "c1 holds nothing but background" in checked.warnings[0]


def test_nothing_but_background_in_all_cases_is_refused(root: Path, tmp_path: Path) -> None:
    for number in range(3):
        put(root, f"c{number}", noise(number), np.zeros(SHAPE, np.uint8))
    assert "nothing to learn" in only_fault(root, tmp_path)
    assert "nothing to learn" in only_fault(root, tmp_path, bad_cases="skip")


@pytest.mark.parametrize("form", ["the same bytes", "another type"])
def test_the_same_case_twice(form: str, tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", 4)
    whole = np.arange(960).reshape(SHAPE)
    put(root, "c0", whole.astype(np.int16), classes())
    put(root, "c1", whole.astype(np.int16 if form == "the same bytes" else np.float32), classes())
    fault = only_fault(root, tmp_path)
    assert "c1.nii.gz (case c1, training) holds the voxels of" in fault
    assert "the same case twice" in fault


def test_the_same_voxels_in_training_and_validation(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", 4)
    put(root, "c3", noise(1), classes())
    fault = only_fault(root, tmp_path)
    assert "case c3, validation" in fault
    assert "the same voxels in training and validation" in fault


def test_one_case_that_trains_and_validates_is_no_copy_of_itself(root: Path, tmp_path: Path) -> None:
    assert_sound(root, tmp_path, split={"kind": "same"})


SOUND_TYPES: dict[str, np.ndarray] = {
    "uint16 to 65535": np.linspace(0, 65535, 960).reshape(SHAPE).astype(np.uint16),
    "int64": np.arange(960, dtype=np.int64).reshape(SHAPE) * 10_000_000_000,
    "float64": noise(1).astype(np.float64),
    "big-endian": np.arange(960).reshape(SHAPE).astype(">i2"),
    "int8": (np.arange(960) % 256 - 128).reshape(SHAPE).astype(np.int8),
}


@pytest.mark.parametrize("kind", SOUND_TYPES)
def test_sound_types(kind: str, root: Path, tmp_path: Path) -> None:
    values = SOUND_TYPES[kind]
    put(root, "c1", values, classes())
    checked = check(root, tmp_path / "cache")
    assert checked.faults == ()
    case = found(checked)["c1"]
    assert case.minimum == pytest.approx(float(values.min()))
    assert case.maximum == pytest.approx(float(values.max()))


@pytest.mark.parametrize("dtype", ["uint16", "int64", "float64", ">i2", ">f4", "int8"])
def test_sound_types_of_labels(dtype: str, root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1), classes().astype(dtype))
    checked = check(root, tmp_path / "cache")
    assert checked.faults == ()
    assert found(checked)["c1"].voxels == {0: 640, 1: 160, 2: 160}


@pytest.mark.parametrize("slope", [0.0, np.nan])
def test_a_slope_that_means_none(slope: float, root: Path, tmp_path: Path) -> None:
    path = save(root / "imagesTr/c1.nii", np.arange(960, dtype=np.int16).reshape(SHAPE), scl_slope=1.0, scl_inter=0.0)
    blob = bytearray(path.read_bytes())
    blob[112:116] = np.float32(slope).tobytes()
    path.write_bytes(bytes(blob))
    listed(root, "c1", "imagesTr/c1.nii")
    checked = check(root, tmp_path / "cache")
    assert checked.faults == ()
    assert found(checked)["c1"].maximum == 959


def test_a_slope_counts(root: Path, tmp_path: Path) -> None:
    put(root, "c1", np.arange(960, dtype=np.int16).reshape(SHAPE), classes(), scl_slope=0.5, scl_inter=-10.0)
    case = found(check(root, tmp_path / "cache"))["c1"]
    assert (case.minimum, case.maximum) == (-10.0, 469.5)


def test_nifti_2_odd_sizes_and_volumes_below_the_patch_are_sound(tmp_path: Path) -> None:
    root, shape = make_set(tmp_path / "set"), (37, 45, 11)
    nib.save(nib.Nifti2Image(noise(1, shape), np.eye(4)), root / "imagesTr/c1.nii.gz")
    nib.save(nib.Nifti2Image(classes(shape), np.eye(4)), root / "labelsTr/c1.nii.gz")
    assert_sound(root, tmp_path)


def test_one_file_a_channel(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for number in range(3):
        for channel in range(2):
            save(root / f"imagesTr/c{number}_000{channel}.nii.gz", noise(2 * number + channel))
        save(root / f"labelsTr/c{number}.nii.gz", classes())
    data = {"source": {"kind": "nnunet"}, "channels": ["a", "b"]}
    assert_sound(root, tmp_path, **data)
    save(root / "imagesTr/c0_0001.nii.gz", noise(1, (12, 10, 9)))
    save(root / "imagesTr/c1_0001.nii.gz", np.full(SHAPE, 3, np.int16))
    save(root / "imagesTr/c2_0000.nii.gz", noise(2)[..., None] * np.ones(3, np.float32))
    bad = check(root, tmp_path / "cache", **data).bad
    assert ["12×10×9" in bad["c0"][0], "channel b is 3" in bad["c1"][0], "3 channels" in bad["c2"][0]] == [True] * 3


def test_float16_that_cannot_hold_a_value(root: Path, tmp_path: Path) -> None:
    put(root, "c1", noise(1) * 1e6, classes())
    assert "beyond float16's 65504" in only_fault(root, tmp_path, storage_dtype="float16")
    assert_sound(root, tmp_path, storage_dtype="float16", intensity={"kind": "zscore"})


def test_a_mask_of_0_and_255_names_both_remedies(tmp_path: Path) -> None:
    root, label = tmp_path / "set", np.zeros(SHAPE, np.uint8)
    label[:6] = 255
    for number in range(3):
        put(root, f"c{number}", noise(number), label)
    one = {"classes": {1: "organ"}}
    faults = check(root, tmp_path / "cache", **one).faults
    assert len(faults) == 3
    assert all("255 in 480 voxels" in fault for fault in faults)
    assert all("data.label_map: {255: 1}" in fault and "data.ignore_label: 255" in fault for fault in faults)
    mapped = check(root, tmp_path / "cache", label_map={255: 1}, **one)
    assert (mapped.faults, mapped.warnings) == ((), ())
    assert found(mapped)["c0"].voxels == {0: 480, 1: 480}
    assert_sound(root, tmp_path, classes={255: "organ"})


def test_voxels_to_be_ignored_are_no_fault_and_no_class(root: Path, tmp_path: Path) -> None:
    label = classes()
    label[8] = 255
    put(root, "c1", noise(1), label)
    ignoring = check(root, tmp_path / "cache", ignore_label=255)
    assert (ignoring.faults, ignoring.warnings) == ((), ())
    assert found(ignoring)["c1"].voxels == {0: 560, 1: 160, 2: 160}
