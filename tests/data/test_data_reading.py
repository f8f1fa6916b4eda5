"""Reading survives every odd file with an image or one sentence, and holds the policies on grids, labels and NaN."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.nifti import read_file, read_header
from fasttrain.data.reading import read_image, read_label
from fasttrain.errors import DataError
from fasttrain.samples import Case, Grid

DATA = make_recipe().data
TWO = make_recipe(channels=["a", "b"]).data


def image_of(*paths: Path, data: Any = DATA, dimensions: int = 3) -> tuple[np.ndarray, Grid]:
    return read_image(Case("a", paths, None), data, dimensions)


def label_on(image: Path, label: Path, data: Any = DATA, dimensions: int = 3) -> np.ndarray:
    case = Case("a", (image,), label)
    values, grid = read_label(case, data, dimensions, read_image(case, data, dimensions)[1])
    assert values.dtype == np.uint8
    assert values.flags.c_contiguous
    assert grid.shape == values.shape[1:]
    return values


def fault_of(call: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    assert len(caught.value.faults) == 1
    assert "\n" not in caught.value.faults[0]
    return caught.value.faults[0]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", ">f4", "<f8"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_every_number_type_is_read(tmp_path: Path, dtype: str, kind: Any, ending: str) -> None:
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    header = kind.header_class(endianness=dtype[0] if dtype[0] in "<>" else "<")
    header.set_data_dtype(values.dtype)
    nib.save(kind(values, np.diag([1, 2, 3, 1]), header, dtype=values.dtype), tmp_path / f"i{ending}")
    image, grid = image_of(tmp_path / f"i{ending}")
    assert image.dtype == np.float32
    assert image.flags.c_contiguous
    assert np.array_equal(image[0], values.astype(np.float32))
    assert grid.affine.tolist() == np.diag([1.0, 2, 3, 1]).tolist()


@settings(max_examples=40, deadline=None)
@given(
    slope=st.floats(2**-20, 1024, width=32),
    inter=st.floats(-2000, 2000, width=32),
    dtype=st.sampled_from(["u1", "<i2", "<i4", "<f4"]),
)
def test_scaling_is_honoured_as_nibabel_does(
    tmp_path_factory: pytest.TempPathFactory, slope: float, inter: float, dtype: str
) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    path = save(tmp_path_factory.mktemp("s") / "i.nii", values, scl_slope=slope, scl_inter=inter)
    wanted = nib.load(path).get_fdata()
    assert np.allclose(image_of(path)[0][0], wanted, rtol=1e-5, atol=1e-6 * max(1.0, abs(inter)))


def test_damaged_files_give_one_sentence(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    plain = save(tmp_path / "good.nii", values).read_bytes()
    packed = gzip.compress(plain)
    flipped = bytearray(packed)
    flipped[-8] ^= 1
    header = bytearray(plain)
    header[70:72] = struct.pack("<h", 12345)
    negative = bytearray(plain)
    negative[42:44] = struct.pack("<h", -8)
    flat = bytearray(plain)
    flat[280:328] = bytes(48)
    damages: dict[str, tuple[str, bytes, str]] = {
        "empty": ("e.nii.gz", b"", "is empty"),
        "cut gzip": ("c.nii.gz", packed[: len(packed) // 2], "end too early"),
        "cut before its end mark": ("m.nii.gz", packed[:-6], "end too early"),
        "wrong checksum": ("w.nii.gz", bytes(flipped), "incorrect data check"),
        "cut plain": ("p.nii", plain[:-100], "is cut short"),
        "cut inside gzip": ("q.nii.gz", gzip.compress(plain[:-100]), "is cut short"),
        "header alone": ("h.nii", plain[:200], "is not a NIfTI file"),
        "plain called gz": ("x.nii.gz", plain, "holds plain NIfTI; rename it to x.nii"),
        "gz called plain": ("y.nii", packed, "rename it to y.nii.gz"),
        "text called gz": ("t.nii.gz", b"version https://git-lfs" * 9, "holds neither gzip nor NIfTI"),
        "text": ("t.nii", b"hello" * 100, "is not a NIfTI file"),
        "unknown type code": ("d.nii", bytes(header), "damaged NIfTI header"),
        "negative length": ("n.nii", bytes(negative), "holds no voxels"),
        "no volume": ("a.nii", bytes(flat), "affine without a volume"),
        "garbage behind": ("g.nii.gz", packed + b"garbage", "follow the end"),
    }
    for what, (name, blob, expected) in damages.items():
        (tmp_path / name).write_bytes(blob)
        sentence = fault_of(lambda name=name: image_of(tmp_path / name))  # type: ignore[misc]
        assert expected in sentence, what
        assert name in sentence
    assert "does not exist" in fault_of(lambda: image_of(tmp_path / "absent.nii"))
    assert "is no regular file" in fault_of(lambda: image_of(tmp_path))
    # Controls: several gzip members and zeros at the end are legal.
    for blob in (gzip.compress(plain[:500]) + gzip.compress(plain[500:]), packed + bytes(512)):
        (tmp_path / "legal.nii.gz").write_bytes(blob)
        assert np.array_equal(image_of(tmp_path / "legal.nii.gz")[0][0], values)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random bytes are changed in header or gzip stream: an array or a DataError, nothing else."""
    folder = tmp_path_factory.mktemp("fuzz")
    plain = save(folder / "good.nii", np.arange(60, dtype=np.int16).reshape(3, 4, 5)).read_bytes()
    zipped = data.draw(st.booleans())
    blob = bytearray(gzip.compress(plain, mtime=0) if zipped else plain)
    for _ in range(data.draw(st.integers(1, 6))):
        blob[data.draw(st.integers(0, min(len(blob), 352) - 1))] = data.draw(st.integers(0, 255))
    path = folder / ("f.nii.gz" if zipped else "f.nii")
    path.write_bytes(bytes(blob))
    with np.errstate(all="ignore"):
        for read in (lambda: image_of(path)[0], lambda: read_header(path)):
            try:
                read()
            except DataError as error:
                sentence = str(error)
            else:
                sentence = str(path)
            assert str(path) in sentence


def test_header_alone_equals_the_whole_file(tmp_path: Path) -> None:
    path = save(tmp_path / "i.nii.gz", np.zeros((30, 31, 32), np.int16), np.diag([1, 2, 3, 1.0]))
    assert read_header(path).shape == read_file(path).header.shape == (30, 31, 32)
    assert np.array_equal(read_header(path).affine, read_file(path).header.affine)


@pytest.mark.parametrize("dtype", [np.complex64, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])])
def test_colour_and_complex_are_refused(tmp_path: Path, dtype: Any) -> None:
    path = save(tmp_path / "i.nii", np.zeros((3, 3, 3), dtype))
    assert ("complex" if dtype is np.complex64 else "colour (RGB)") in fault_of(lambda: image_of(path))


def test_real_odd_files(real_data: Callable[[str], Path]) -> None:
    seen = {"image": 0, "sentence": 0}
    for path in sorted(path for path in real_data("odd").iterdir() if path.suffix != ".dcm"):
        channels = read_header(path).shape[3:] if path.name.startswith("nibabel") else ()
        data = make_recipe(channels=[str(n) for n in range(channels[0] if channels else 1)]).data
        try:
            image, grid = read_image(Case(path.name, (path,), None), data, 3)
        except DataError as error:
            faults = error.faults
        else:
            assert image.shape[1:] == grid.shape
            wanted = nib.load(path).get_fdata().reshape(*grid.shape, -1)
            assert np.allclose(np.moveaxis(image, 0, -1), wanted, rtol=1e-5, atol=1e-3)
            seen["image"] += 1
            continue
        assert len(faults) == 1
        seen["sentence"] += 1
    assert seen["image"] >= 8
    assert seen["sentence"] >= 1


# --- shapes and channels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "channels", "dimensions", "wanted"),
    [
        ((4, 5, 6), 1, 3, (1, 4, 5, 6)),
        ((4, 5, 6, 1), 1, 3, (1, 4, 5, 6)),
        ((4, 5, 6, 1, 1), 1, 3, (1, 4, 5, 6)),
        ((4, 5, 6, 3), 3, 3, (3, 4, 5, 6)),
        ((4, 5, 6, 1, 3), 3, 3, (3, 4, 5, 6)),
        ((4, 5, 1), 1, 3, (1, 4, 5, 1)),
        ((4, 5), 1, 2, (1, 4, 5)),
        ((4, 5, 1), 1, 2, (1, 4, 5)),
        ((4, 5, 3), 3, 2, (3, 4, 5)),
        ((4, 5, 1, 3), 3, 2, (3, 4, 5)),
    ],
)
def test_axes_become_channels_first(
    tmp_path: Path, shape: tuple[int, ...], channels: int, dimensions: int, wanted: tuple[int, ...]
) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    data = make_recipe(channels=[str(n) for n in range(channels)]).data
    image, grid = image_of(save(tmp_path / "i.nii", values), data=data, dimensions=dimensions)
    assert image.shape == wanted
    assert grid.shape == wanted[1:]
    assert np.array_equal(np.moveaxis(image, 0, -1).reshape(-1), values.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "channels", "dimensions", "expected"),
    [
        ((4, 5, 6, 2), 1, 3, "4×5×6×2, 2 channels, but data.channels names 1 (0)"),
        ((4, 5, 6), 2, 3, "1 channel, but data.channels names 2"),
        ((4, 5), 1, 3, "2 axes, but patch.size has 3"),
        ((4, 5, 6), 1, 2, "6 channels, but data.channels names 1"),
        ((4, 5, 6, 2, 2), 2, 3, "3 spatial axes and channels last"),
    ],
)
def test_other_axes_are_refused(
    tmp_path: Path, shape: tuple[int, ...], channels: int, dimensions: int, expected: str
) -> None:
    path = save(tmp_path / "i.nii", np.zeros(shape, np.uint8))
    data = make_recipe(channels=[str(n) for n in range(channels)]).data
    assert expected in fault_of(lambda: image_of(path, data=data, dimensions=dimensions))


def test_one_file_a_channel(tmp_path: Path) -> None:
    first = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    a = save(tmp_path / "a.nii.gz", first, np.diag([1, 1, 2, 1.0]))
    flipped = np.diag([-1, 1, 2, 1.0])
    flipped[0, 3] = 3
    b = save(tmp_path / "b.nii.gz", first[::-1] * 2, flipped)
    image, grid = image_of(a, b, data=TWO)
    assert np.array_equal(image, np.stack([first, first * 2]))
    assert np.array_equal(grid.affine, np.diag([1, 1, 2, 1.0]))
    c = save(tmp_path / "c.nii.gz", first, np.diag([1, 1, 2.1, 1.0]))
    assert "c.nii.gz lies 0.5 mm" in fault_of(lambda: image_of(a, c, data=TWO))
    with pytest.raises(DataError) as caught:
        image_of(tmp_path / "x.nii", tmp_path / "y.nii", data=TWO)
    assert len(caught.value.faults) == 2
    assert "has 3 image files, but data.channels names 2" in fault_of(lambda: image_of(a, b, c, data=TWO))


# --- grids -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(axes=st.permutations([0, 1, 2]), signs=st.tuples(*(st.sampled_from([-1, 1]),) * 3), angle=st.floats(-0.7, 0.7))
def test_labels_in_another_memory_order_are_brought_back(
    tmp_path_factory: pytest.TempPathFactory, axes: list[int], signs: tuple[int, ...], angle: float
) -> None:
    folder = tmp_path_factory.mktemp("order")
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag([1.0, 1.5, 2.5])
    affine[:3, 3] = [5, -6, 7]
    label = np.random.default_rng(0).integers(0, 3, (4, 5, 6)).astype(np.uint8)
    image = save(folder / "i.nii", label.astype(np.float32), affine)
    orientation = np.c_[axes, signs]
    moved = nib.orientations.apply_orientation(label, orientation)
    step = nib.orientations.inv_ornt_aff(orientation, label.shape)
    path = save(folder / "l.nii", np.ascontiguousarray(moved), affine @ step)
    assert np.array_equal(label_on(image, path)[0], label)


def test_planes_in_another_memory_order_are_brought_back(tmp_path: Path) -> None:
    affine = np.array([[0, 0, 1.0, 7], [1.2, 0, 0, 3], [0, -0.8, 0, 2], [0, 0, 0, 1]])
    label = np.random.default_rng(0).integers(0, 3, (4, 5)).astype(np.uint8)
    image = save(tmp_path / "i.nii", label.astype(np.float32), affine)
    step = np.array([[0, -1.0, 0, 3], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    path = save(tmp_path / "l.nii", np.ascontiguousarray(label.T[:, ::-1]), affine @ step)
    assert np.array_equal(label_on(image, path, dimensions=2)[0], label)


@pytest.mark.parametrize(("shift", "accepted"), [(0.0, True), (0.19, True), (0.21, False), (40.0, False)])
def test_corners_may_differ_by_a_tenth_of_a_voxel(tmp_path: Path, shift: float, accepted: bool) -> None:
    """2 mm voxels: 0.2 mm is the bound."""
    label = np.ones((4, 5, 6), np.uint8)
    image = save(tmp_path / "i.nii", label, np.diag([2.0, 2, 2, 1]))
    affine = np.diag([2.0, 2, 2, 1])
    affine[1, 3] = shift
    path = save(tmp_path / "l.nii", label, affine)
    if accepted:
        assert label_on(image, path).sum() == 120
    else:
        sentence = fault_of(lambda: label_on(image, path))
        assert f"{shift:.4g} mm ({shift / 2:.3g} voxels)" in sentence


def test_a_flipped_affine_without_flipped_memory_is_refused(tmp_path: Path) -> None:
    label = np.ones((4, 5, 6), np.uint8)
    image = save(tmp_path / "i.nii", label)
    path = save(tmp_path / "l.nii", label, np.diag([-1.0, 1, 1, 1]))
    assert "lies 3 mm (3 voxels)" in fault_of(lambda: label_on(image, path))


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    image = save(tmp_path / "i.nii", np.ones((4, 5, 6), np.uint8))
    swapped = save(tmp_path / "s.nii", np.ones((5, 4, 6), np.uint8))
    sentence = fault_of(lambda: label_on(image, swapped))
    assert "5×4×6" in sentence
    assert "4×5×6" in sentence
    assert "in another order" in sentence
    other = save(tmp_path / "o.nii", np.ones((4, 5, 7), np.uint8))
    assert "order" not in fault_of(lambda: label_on(image, other))
    four = save(tmp_path / "f.nii", np.ones((4, 5, 6, 2), np.uint8))
    assert "one class value a voxel" in fault_of(lambda: label_on(image, four))


# --- label values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i2", "<i4", "<i8", "<f4", "<f8"])
def test_declared_values_become_class_indices(tmp_path: Path, dtype: str) -> None:
    data = make_recipe(classes={4: "enhancing", 1: "necrosis", 2: "oedema"}).data
    values = np.array([0, 1, 2, 4] * 6).reshape(2, 3, 4)
    path = save(tmp_path / "l.nii", values.astype(dtype))
    assert np.array_equal(label_on(path, path, data=data)[0], np.array([0, 1, 2, 0, 3])[values])


def test_undeclared_values_are_counted(tmp_path: Path) -> None:
    values = np.zeros((4, 4, 4), np.int16)
    values[0, 0, :3] = 255
    values[1, 0, 0] = -3
    path = save(tmp_path / "l.nii", values)
    sentence = fault_of(lambda: label_on(path, path))
    assert "values -3 in 1 voxel, 255 in 3 voxels" in sentence
    assert "0 background, 1 liver, 2 kidney" in sentence
    many = save(tmp_path / "m.nii", np.arange(64, dtype=np.uint8).reshape(4, 4, 4))
    assert "53 more values" in fault_of(lambda: label_on(many, many))


@settings(max_examples=50, deadline=None)
@given(highest=st.integers(2, 20), levels=st.sampled_from([255, 32767]))
def test_labels_under_a_scale_factor_are_rounded(
    tmp_path_factory: pytest.TempPathFactory, highest: int, levels: int
) -> None:
    """What nibabel does to a label of 0 … highest saved in whole steps: 0.996 for 1 where 2 are spread over 255."""
    slope = float(np.float32(highest / levels))
    wanted = np.arange(highest + 1)
    raw = np.rint(wanted / slope).astype(np.uint8 if levels == 255 else np.int16).reshape(-1, 1, 1)
    path = save(tmp_path_factory.mktemp("s") / "l.nii", raw, scl_slope=slope)
    data = make_recipe(classes={value: f"c{value}" for value in range(1, highest + 1)}).data
    assert label_on(path, path, data=data).ravel().tolist() == wanted.tolist()


def test_probabilities_are_refused(tmp_path: Path) -> None:
    soft = np.linspace(0, 1, 27).reshape(3, 3, 3).astype(np.float32)
    for path in (
        save(tmp_path / "f.nii", soft),
        save(tmp_path / "one.nii", soft, scl_slope=1.0, scl_inter=0.0),
        save(tmp_path / "u.nii", np.rint(soft * 255).astype(np.uint8), scl_slope=1 / 255),
    ):
        assert "no whole numbers" in fault_of(lambda path=path: label_on(path, path))  # type: ignore[misc]
    nearly = save(tmp_path / "n.nii", np.float32([0.9995, 0, 2.0004]).reshape(3, 1, 1))
    assert label_on(nearly, nearly).ravel().tolist() == [1, 0, 2]


def test_nan_and_infinity(tmp_path: Path) -> None:
    values = np.arange(27, dtype=np.float32).reshape(3, 3, 3) + 5
    values[0, 0, :2] = np.nan
    values[1, 1, 1] = -np.inf
    path = save(tmp_path / "i.nii", values)
    assert "2 NaN and 1 infinite voxels in channel CT" in fault_of(lambda: image_of(path))
    replaced, _ = image_of(path, data=make_recipe(nan_policy="replace").data)
    assert np.array_equal(replaced[0], np.where(np.isfinite(values), values, 7))
    four = np.stack([values, np.where(np.isfinite(values), values, 0) - 100], axis=-1)
    both, _ = image_of(save(tmp_path / "4.nii", four), data=make_recipe(channels=["a", "b"], nan_policy="replace").data)
    assert both[0].min() == 7
    assert both[1].min() == -100
    nothing = save(tmp_path / "n.nii", values * np.nan)
    assert "no finite voxel" in fault_of(lambda: image_of(nothing, data=make_recipe(nan_policy="replace").data))
    label = save(tmp_path / "l.nii", np.where(np.isfinite(values), 0, values))
    good = save(tmp_path / "g.nii", np.zeros((3, 3, 3), np.uint8))
    assert "3 NaN or infinite voxels in a label" in fault_of(
        lambda: label_on(good, label, data=make_recipe(nan_policy="replace").data)
    )
    wide = save(tmp_path / "w.nii", np.full((3, 3, 3), 1e300))
    assert "no finite voxel" in fault_of(lambda: image_of(wide))
