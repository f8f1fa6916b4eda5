"""Odd and damaged files, each an image or one sentence, beside sound ones that must be taken: no other error, no warning."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from data_builders import make_recipe, save
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fasttrain.data.nifti import read_file, read_header
from fasttrain.data.reading import check_channels, coarse_fault, is_one_hot, read_image, read_label
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.samples import Case, Grid

DATA = make_recipe().data
FOUR = make_recipe(channels=["T1", "T1c", "T2", "FLAIR"]).data


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def image_of(*paths: Path, data: DataSpec = DATA, dimensions: int = 3) -> tuple[np.ndarray, Grid]:
    with no_warning():
        return read_image(Case("a", paths, None), data, dimensions)


def label_of(path: Path, image: Path | None = None, data: DataSpec = DATA, dimensions: int = 3) -> np.ndarray:
    case = Case("a", (image or path,), path)
    with no_warning():
        grid = read_image(case, data, dimensions)[1] if image else None
        return read_label(case, data, dimensions, grid)[0]


def fault_of(call: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    (fault,) = caught.value.faults
    assert "\n" not in fault
    return fault


def faults_of(path: Path, read: Callable[[Path], Any]) -> tuple[str, ...]:
    """None where the file is read; sentences about it; anything else fails the test."""
    with no_warning():
        try:
            read(path)
        except DataError as error:
            faults = error.faults
        else:
            return ()
    assert faults
    for fault in faults:
        assert str(path) in fault
        assert "\n" not in fault
    return faults


def written(folder: Path, name: str, blob: bytes) -> Path:
    (folder / name).write_bytes(blob)
    return folder / name


# --- real odd files ----------------------------------------------------------------------------------------------------


def test_every_real_odd_file_is_an_image_or_a_sentence_as_image_and_as_label(real_data: Callable[[str], Path]) -> None:
    seen: dict[str, str] = {}
    for path in sorted(path for path in real_data("odd").iterdir() if path.suffix != ".dcm"):
        for read in (image_of, label_of):
            for dimensions in (2, 3):
                faults = faults_of(path, lambda p, read=read, n=dimensions: read(p, dimensions=n))  # type: ignore[misc]
                assert len(faults) <= 1
                seen[path.name] = seen.get(path.name, "") + (faults or ("read",))[0]
    assert sum("read" in what.replace("is not read", "") for what in seen.values()) >= 5


# --- damage ------------------------------------------------------------------------------------------------------------

VALUES = np.random.default_rng(0).integers(-1000, 1000, (32, 32, 32)).astype(np.int16)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A volume of 32³ as .nii and .nii.gz."""
    plain = save(tmp_path_factory.mktemp("sound") / "a.nii", VALUES).read_bytes()
    return plain, gzip.compress(plain, compresslevel=1, mtime=0)


def test_each_damage_of_a_volume_is_one_sentence(tmp_path: Path, sound: tuple[bytes, bytes]) -> None:
    plain, packed = sound

    def flipped(blob: bytes, place: int) -> bytes:
        return blob[:place] + bytes([blob[place] ^ 0x10]) + blob[place + 1 :]

    damages = {
        "half.nii.gz": (packed[: len(packed) // 2], "end too early"),
        "stream.nii.gz": (flipped(packed, len(packed) // 2), "is damaged: gzip says"),
        "checksum.nii.gz": (flipped(packed, len(packed) - 6), "incorrect data check"),
        "length.nii.gz": (flipped(packed, len(packed) - 3), "incorrect length check"),
        "method.nii.gz": (flipped(packed, 2), "is damaged: gzip says unknown compression method"),
        "empty.nii.gz": (b"", "is empty (0 bytes)"),
        "plain.nii.gz": (plain, "ends in .gz but holds plain NIfTI; rename it to plain.nii"),
        "packed.nii": (packed, "rename it to packed.nii.gz"),
        "half.nii": (
            plain[: len(plain) // 2],
            "is cut short: its header announces 32×32×32 voxels of int16, 65,536 bytes, but",
        ),
        "short.nii.gz": (gzip.compress(plain[: len(plain) // 2]), "is cut short"),
        "garbage.nii.gz": (packed + b"garbage", "7 bytes follow the end of the compressed data"),
        "trailer.nii.gz": (packed[:-8], "end too early"),
        "two bytes.nii.gz": (packed[:2], "is damaged: gzip says"),
        "apple.nii.gz": (b"\x00\x05\x16\x07" + bytes(200), "is what macOS left beside a file"),
        "page.nii.gz": (b"<!DOCTYPE html><html>", "holds neither gzip nor NIfTI"),
    }
    for name, (blob, expected) in damages.items():
        path = written(tmp_path, name, blob)
        for call in (lambda p=path: image_of(p), lambda p=path: label_of(p)):  # type: ignore[misc]
            fault = fault_of(call)
            assert expected in fault, name
            assert str(path) in fault


def with_field(plain: bytes, place: int, form: str, *values: float) -> bytes:
    blob = bytearray(plain)
    struct.pack_into("<" + form, blob, place, *values)
    return bytes(blob)


@pytest.mark.parametrize("claimed", [0, 1, 65_888, 65_889, 2**20, 2**31, 2**32 - 1])
def test_a_length_that_a_trailer_claims_takes_no_memory(
    tmp_path: Path, sound: tuple[bytes, bytes], claimed: int
) -> None:
    path = written(tmp_path, "a.nii.gz", sound[1][:-4] + struct.pack("<I", claimed))
    tracemalloc.start()
    try:
        if claimed == 65_888:
            assert np.array_equal(image_of(path)[0][0], VALUES)
        else:
            assert "incorrect length check" in fault_of(lambda: image_of(path))
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_a_shape_that_a_header_claims_takes_no_memory(tmp_path: Path, sound: tuple[bytes, bytes]) -> None:
    huge = with_field(sound[0], 40, "8h", 7, *(32767,) * 7)
    for path in (written(tmp_path, "a.nii", huge), written(tmp_path, "a.nii.gz", gzip.compress(huge))):
        tracemalloc.start()
        try:
            assert "is cut short" in fault_of(lambda path=path: read_file(path))  # type: ignore[misc]
            assert tracemalloc.get_traced_memory()[1] < 4e6
        finally:
            tracemalloc.stop()


def test_zeros_packed_a_thousandfold_are_not_kept(tmp_path: Path, sound: tuple[bytes, bytes]) -> None:
    """A small volume with 300 MB behind its voxels: read, and hardly any memory taken."""
    packer = zlib.compressobj(9, wbits=31)
    blob = packer.compress(sound[0]) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(300)) + packer.flush()
    path = written(tmp_path, "a.nii.gz", blob)
    tracemalloc.start()
    try:
        assert np.array_equal(image_of(path)[0][0], VALUES)
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()


def test_several_members_are_read(tmp_path: Path, sound: tuple[bytes, bytes]) -> None:
    """As bgzip writes them: the length in the trailer is the last member's alone."""
    plain = sound[0]
    blob = b"".join(gzip.compress(plain[at : at + 5000]) for at in range(0, len(plain), 5000)) + gzip.compress(b"")
    assert np.array_equal(image_of(written(tmp_path, "a.nii.gz", blob))[0][0], VALUES)
    assert "is damaged" in fault_of(lambda: image_of(written(tmp_path, "b.nii.gz", blob[:-60])))


SMALL = np.arange(60, dtype=np.int16).reshape(3, 4, 5)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    plain = save(tmp_path_factory.mktemp("small") / "a.nii", SMALL, np.diag([1, 2, 3, 1.0])).read_bytes()
    return plain, gzip.compress(plain, mtime=0)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), mask=st.integers(1, 255))
@example(place=3, mask=2)
@example(place=3, mask=255)
def test_no_flip_in_a_packed_file_changes_a_voxel(
    tmp_path_factory: pytest.TempPathFactory, small: tuple[bytes, bytes], place: int, mask: int
) -> None:
    blob = bytearray(small[1])
    blob[place % len(blob)] ^= mask
    path = written(tmp_path_factory.mktemp("flip"), "a.nii.gz", bytes(blob))
    if not faults_of(path, image_of):
        assert np.array_equal(image_of(path)[0][0], SMALL)
    faults_of(path, read_header)


@settings(max_examples=400, deadline=None)
@given(
    packed=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 351), st.integers(0, 255)), min_size=1, max_size=6),
    length=st.none() | st.integers(0, 600),
    dimensions=st.sampled_from([2, 3]),
)
def test_no_damage_of_a_header_escapes(
    tmp_path_factory: pytest.TempPathFactory,
    small: tuple[bytes, bytes],
    packed: bool,
    changes: list[tuple[int, int]],
    length: int | None,
    dimensions: int,
) -> None:
    blob = bytearray(small[0])
    for place, value in changes:
        blob[place] = value
    cut = bytes(blob[:length])
    name = "a.nii.gz" if packed else "a.nii"
    path = written(tmp_path_factory.mktemp("head"), name, gzip.compress(cut) if packed else cut)
    faults_of(path, read_header)
    faults_of(path, lambda p: read_image(Case("a", (p,), None), DATA, dimensions))
    faults_of(path, lambda p: read_label(Case("a", (p,), p), DATA, dimensions, None))
    faults_of(path, lambda p: read_label(Case("a", (p,), p), DATA, 3, Grid((3, 4, 5), np.diag([1, 2, 3, 1.0]))))


# --- colour, complex, channels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "word"), [
    (np.complex64, "complex"), (np.complex128, "complex"), ([("R", "u1"), ("G", "u1"), ("B", "u1")], "colour (RGB)"),
    ([("R", "u1"), ("G", "u1"), ("B", "u1"), ("A", "u1")], "colour (RGB)"),
])  # fmt: skip
def test_colour_and_complex_as_image_and_as_label(tmp_path: Path, dtype: Any, word: str) -> None:
    path = save(tmp_path / "a.nii", np.zeros((4, 5, 6), dtype))
    assert word in fault_of(lambda: image_of(path))
    assert word in fault_of(lambda: label_of(path))


def test_four_volumes_are_four_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(24, 24, 16, 4)).astype(np.float32) + np.float32([0, 100, 200, 300])
    image, grid = image_of(save(tmp_path / "a.nii.gz", values), data=FOUR)
    assert image.shape == (4, 24, 24, 16)
    assert grid.shape == (24, 24, 16)
    assert np.allclose(image.mean(axis=(1, 2, 3)), [0, 100, 200, 300], atol=0.1)
    assert np.array_equal(image, np.moveaxis(values, -1, 0))
    ten = save(tmp_path / "ten.nii.gz", np.zeros((24, 24, 16, 10), np.float32))
    assert "24×24×16×10, 10 channels, but data.channels names 4" in fault_of(lambda: image_of(ten, data=FOUR))
    first = save(tmp_path / "first.nii.gz", np.zeros((4, 24, 24, 16), np.float32))
    assert "channels are stored last" in fault_of(lambda: image_of(first, data=FOUR))
    one = save(tmp_path / "one.nii.gz", values[..., :1])
    assert image_of(one)[0].shape == (1, 24, 24, 16)
    with pytest.raises(DataError, match="name as many channels as the file has"):
        check_channels(ten, (24, 24, 16, 10), 10, FOUR)


def test_large_and_small_volumes_are_copied_alike(tmp_path: Path) -> None:
    """Volumes beyond the processor's cache go row by row."""
    rng = np.random.default_rng(0)
    for shape in ((90, 70, 60), (90, 70, 20, 3), (700, 900), (3, 300, 700)):
        values = rng.integers(-1000, 1000, shape).astype(np.int16)
        found = shape[3] if len(shape) == 4 else 1
        data = make_recipe(channels=[str(n) for n in range(found)]).data
        dimensions = min(len(shape), 3)
        image, _ = image_of(save(tmp_path / "a.nii", values), data=data, dimensions=dimensions)
        assert np.array_equal(image, np.moveaxis(values.reshape(*shape[:dimensions], found), -1, 0).astype(np.float32))
        scaled, _ = image_of(
            save(tmp_path / "s.nii", values, scl_slope=0.5, scl_inter=3), data=data, dimensions=dimensions
        )
        assert np.array_equal(scaled, image * 0.5 + 3)
        if found == 1:
            label = save(tmp_path / "l.nii", (values % 3).astype(np.uint8))
            assert np.array_equal(label_of(label, dimensions=dimensions)[0], values % 3)


# --- labels with a further axis, other shapes -----------------------------------------------------------------------------


def one_hot(classes: int) -> np.ndarray:
    return np.eye(classes, dtype=np.uint8)[np.random.default_rng(0).integers(0, classes, (24, 24, 16))]


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_one_hot_label_is_called_so(tmp_path: Path, classes: int, dtype: Any) -> None:
    path = save(tmp_path / "l.nii.gz", one_hot(classes).astype(dtype))
    assert is_one_hot(read_file(path).raw)
    fault = fault_of(lambda: label_of(path))
    assert f"24×24×16×{classes}, which looks like a one-hot label of {classes} classes" in fault
    assert "argmax over the last axis" in fault


def test_by_its_number_of_classes_too(tmp_path: Path) -> None:
    """DATA declares two classes; overlapping or soft channels are no clean one-hot."""
    soft = np.random.default_rng(0).random((6, 6, 6, 3)).astype(np.float32)
    assert "one-hot" in fault_of(lambda: label_of(save(tmp_path / "3.nii", soft)))
    assert "one-hot" in fault_of(lambda: label_of(save(tmp_path / "2.nii", soft[..., :2])))
    series = np.random.default_rng(0).integers(0, 3, (6, 6, 6, 7)).astype(np.uint8)
    fault = fault_of(lambda: label_of(save(tmp_path / "7.nii", series)))
    assert "one-hot" not in fault
    assert "7 values a voxel; a label holds one class value a voxel" in fault
    assert not is_one_hot(series)
    assert not is_one_hot(np.zeros((3, 3, 2), np.uint8))
    assert not is_one_hot(np.ones((3, 3, 2), np.uint8))
    # Control: axes of length 1 are no classes
    assert label_of(save(tmp_path / "1.nii", series[..., :1])).shape == (1, 6, 6, 6)
    assert label_of(save(tmp_path / "11.nii", series[..., :1][..., None])).shape == (1, 6, 6, 6)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_same_sizes_in_another_order(tmp_path: Path, dimensions: int) -> None:
    image = save(tmp_path / "i.nii.gz", np.zeros((434, 636, 1), np.int16))
    label = save(tmp_path / "l.nii.gz", np.zeros((1, 434, 636), np.uint8))
    fault = fault_of(lambda: label_of(label, image, dimensions=dimensions))
    assert "1×434×636" in fault
    assert "434×636" in fault.replace("1×434×636", "")
    assert "the same sizes in another order" in fault
    as_image = fault_of(lambda: image_of(label, dimensions=2))
    assert "write it as 434×636×1" in as_image
    middle = save(tmp_path / "m.nii.gz", np.zeros((434, 1, 636), np.int16))
    assert "comes second, so write it as 434×636×1" in fault_of(lambda: image_of(middle, dimensions=2))
    # Control: a plane with and without its trailing axis
    flat = save(tmp_path / "f.nii.gz", np.zeros((434, 636), np.uint8))
    assert label_of(flat, image, dimensions=2).shape == (1, 434, 636)


def test_other_shapes_are_refused_with_both(tmp_path: Path) -> None:
    image = save(tmp_path / "i.nii.gz", np.zeros((48, 48, 33), np.int16))
    label = save(tmp_path / "l.nii.gz", np.zeros((48, 48, 48), np.uint8))
    fault = fault_of(lambda: label_of(label, image))
    assert "48×48×48" in fault
    assert "48×48×33" in fault
    assert "resample one onto the other's grid" in fault


# --- sound input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_label_flipped_in_memory_and_affine_lies_where_it_was(tmp_path: Path, axes: tuple[int, ...]) -> None:
    label = np.random.default_rng(0).integers(0, 3, (9, 7, 5)).astype(np.uint8)
    affine = np.array([[0.7, 0.1, 0, -20], [-0.1, 0.8, 0, 30], [0, 0, 2.5, 7], [0, 0, 0, 1]])
    image = save(tmp_path / "i.nii.gz", label.astype(np.float32), affine)
    flipped = affine.copy()
    for axis in axes:
        flipped[:3, 3] += flipped[:3, axis] * (label.shape[axis] - 1)
        flipped[:3, axis] *= -1
    path = save(tmp_path / "l.nii.gz", np.flip(label, axes), flipped)
    assert np.array_equal(label_of(path, image)[0], label)


def test_noise_in_the_affine(tmp_path: Path) -> None:
    label = np.random.default_rng(0).integers(0, 3, (48, 48, 33)).astype(np.uint8)
    affine = np.diag([0.7, 0.7, 2.5, 1]) + np.random.default_rng(1).normal(scale=1e-8, size=(4, 4)) * [
        [1],
        [1],
        [1],
        [0],
    ]
    image = save(tmp_path / "i.nii.gz", label, np.diag([0.7, 0.7, 2.5, 1]))
    assert np.array_equal(label_of(save(tmp_path / "l.nii.gz", label, affine), image)[0], label)


def with_slope(tmp_path: Path, values: np.ndarray, slope: float, inter: float) -> Path:
    plain = save(tmp_path / "plain.nii", values).read_bytes()
    return written(tmp_path, "slope.nii", with_field(plain, 112, "2f", slope, inter))


@pytest.mark.parametrize(("slope", "inter"), [(0, 0), (np.nan, np.nan), (0, np.nan), (np.nan, 5), (np.inf, 0), (1, 0)])
def test_a_slope_that_is_none(tmp_path: Path, slope: float, inter: float) -> None:
    values = np.arange(60).reshape(3, 4, 5).astype(np.int16)
    path = with_slope(tmp_path, values, slope, inter)
    assert np.array_equal(image_of(path)[0][0], values)
    assert not label_of(with_slope(tmp_path, values % 3, slope, inter)).max() > 2


def test_a_slope_with_no_intercept_to_go_with_it(tmp_path: Path) -> None:
    assert "damaged NIfTI header" in fault_of(lambda: image_of(with_slope(tmp_path, SMALL, 2.0, np.nan)))


@pytest.mark.parametrize("dtype", ["u2", ">u2", "<i4", ">i8", "<i8", "<f8", ">f8", ">f4"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_wide_numbers(tmp_path: Path, dtype: str, kind: Any) -> None:
    values = np.array([0, 1, 255, 256, 32768, 65535] * 10).reshape(3, 4, 5).astype(dtype)
    header = kind.header_class(endianness=">" if dtype[0] == ">" else "<")
    header.set_data_dtype(values.dtype)
    for name in ("a.nii", "a.nii.gz"):
        nib.save(kind(values, np.eye(4), header, dtype=values.dtype), tmp_path / name)
        assert np.array_equal(image_of(tmp_path / name)[0][0], values.astype(np.float64))
    labels = (values.astype(np.int64) % 3).astype(dtype)
    nib.save(kind(labels, np.eye(4), header, dtype=labels.dtype), tmp_path / "l.nii.gz")
    assert np.array_equal(label_of(tmp_path / "l.nii.gz")[0], labels.astype(np.uint8))


@pytest.mark.parametrize("shape", [(1, 7, 13), (37, 45, 11), (5, 5, 5), (2, 3, 4)])
def test_odd_sizes_and_volumes_smaller_than_the_patch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    assert np.array_equal(image_of(save(tmp_path / "a.nii.gz", values))[0][0], values)


def test_label_values_beyond_what_a_float_can_tell(tmp_path: Path) -> None:
    """2⁵³ + 1 is 2⁵³ in float64, and 256 + 1 is 1 in uint8: neither passes for a class."""
    for value in (2**53 + 1, 257, 2**32 + 1, -255, -(2**63)):
        values = np.zeros((3, 4, 5), np.int64)
        values[0, 0, 0] = value
        fault = fault_of(lambda values=values: label_of(save(tmp_path / "l.nii", values)))  # type: ignore[misc]
        assert "undeclared" in fault
        assert "1 voxel" in fault


def test_images_beyond_the_whole_numbers_of_float32(tmp_path: Path) -> None:
    """Rounding by a ten-millionth is taken; values that all but fall together are refused."""
    ramp = np.arange(60).reshape(3, 4, 5)
    wide = (ramp * 10**9).astype(np.int64)
    assert np.allclose(image_of(save(tmp_path / "w.nii", wide))[0][0], wide, rtol=1e-7)
    for dtype in (np.int32, np.int64, np.float64):
        fault = fault_of(lambda dtype=dtype: image_of(save(tmp_path / "o.nii", (ramp + 10**9).astype(dtype))))  # type: ignore[misc]
        assert "float32 keeps steps of 64 alone; subtract an offset" in fault
    assert image_of(save(tmp_path / "f.nii", (ramp + 10**9).astype(np.float32)))[0].size == 60
    assert coarse_fault(tmp_path, "CT", np.dtype(np.int32), -(2.0**31), 2.0**31) is None
    assert coarse_fault(tmp_path, "CT", np.dtype(np.int32), 0.0, 4095.0) is None


@pytest.mark.parametrize("length", [346, 347, 348, 351])
def test_a_header_that_is_cut_short_is_one_sentence(length: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.nii"
    nib.save(nib.Nifti1Image(np.ones((4, 5, 6), np.int16), np.eye(4)), path)
    path.write_bytes(path.read_bytes()[:length])
    for read in (read_header, read_file):
        if read is read_header and length > 347:
            continue
        with pytest.raises(DataError, match=r"cut short|not a NIfTI") as caught:
            read(path)
        assert len(caught.value.faults) == 1
