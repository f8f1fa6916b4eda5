"""A gzip file is the same file whoever inflates it: the same voxels, and of a damaged one the same sentence."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_builders import save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasttrain.data import inflate, nifti, seen_files
from fasttrain.data.nifti import read_file, read_header
from fasttrain.errors import DataError

isal_zlib = pytest.importorskip("isal.isal_zlib", reason="isal is not installed, so zlib inflates everything")
VALUES = np.random.default_rng(1).integers(-200, 900, (24, 20, 16)).astype(np.int16)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gzip.compress(save(tmp_path_factory.mktemp("plain") / "a.nii", VALUES).read_bytes(), 6)


@pytest.fixture
def inflated() -> Iterator[list[str]]:
    """Who was asked to inflate, in order."""
    asked: list[str] = []

    class Counting:
        IsalError = isal_zlib.IsalError

        @staticmethod
        def decompressobj(*arguments: Any) -> Any:
            asked.append("isal")
            return isal_zlib.decompressobj(*arguments)

    former, inflate.isal_zlib = inflate.isal_zlib, Counting
    yield asked
    inflate.isal_zlib = former


def told(path: Path, inflater: Any) -> tuple[str, ...] | np.ndarray:
    """The voxels of a file, or the sentences about it."""
    former, inflate.isal_zlib = inflate.isal_zlib, inflater
    try:
        return read_file(path).values()
    except DataError as error:
        return error.faults
    finally:
        inflate.isal_zlib = former


def assert_same(path: Path, blob: bytes) -> Any:
    path.write_bytes(blob)
    fast, plain = told(path, isal_zlib), told(path, None)
    assert type(fast) is type(plain)
    assert np.array_equal(fast, plain) if isinstance(plain, np.ndarray) else fast == plain
    return plain


def test_a_sound_file_is_inflated_once_by_isal(tmp_path: Path, packed: bytes, inflated: list[str]) -> None:
    path = tmp_path / "a.nii.gz"
    path.write_bytes(packed)
    assert np.array_equal(read_file(path).values(), VALUES)
    assert inflated == ["isal"]


def test_several_members_and_zeros_after_the_end_are_the_same_file(tmp_path: Path, packed: bytes) -> None:
    plain = gzip.decompress(packed)
    for blob in (
        b"".join(gzip.compress(plain[first : first + 5000]) for first in range(0, len(plain), 5000)),
        gzip.compress(plain[:-8]) + gzip.compress(plain[-8:]),
        packed + bytes(512),
        gzip.compress(plain, 1),
        gzip.compress(plain, 0),
    ):
        assert np.array_equal(assert_same(tmp_path / "a.nii.gz", blob), VALUES)


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 300, 5000])
def test_a_file_cut_short_is_one_sentence(tmp_path: Path, packed: bytes, cut: int) -> None:
    (fault,) = assert_same(tmp_path / "a.nii.gz", packed[:-cut])
    assert "the compressed data end too early" in fault


def test_what_is_wrong_is_told_in_the_words_of_zlib(tmp_path: Path, packed: bytes) -> None:
    path = tmp_path / "a.nii.gz"
    wrong = bytearray(packed)
    wrong[-6] ^= 0xFF
    assert "incorrect data check" in assert_same(path, bytes(wrong))[0]
    wrong = bytearray(packed)
    wrong[-1] ^= 0x01
    assert "is damaged: gzip says" in assert_same(path, bytes(wrong))[0]
    assert "7 bytes follow the end" in assert_same(path, packed + b"garbage")[0]
    assert "gzip says 1 byte follows the end" in assert_same(path, packed + b"g")[0]


def flipped(blob: bytes, place: int) -> bytes:
    return blob[:place] + bytes([blob[place] ^ 0x10]) + blob[place + 1 :]


def test_what_follows_a_sound_member_is_looked_at_where_it_claims_the_very_length(
    tmp_path: Path, packed: bytes
) -> None:
    path, middle = tmp_path / "a.nii.gz", len(packed) // 2
    for behind, fault in (
        (packed[-4:], "4 bytes follow the end"),
        (packed[-8:], "8 bytes follow the end"),
        (b"junk" * 5000 + packed[-4:], "20,004 bytes follow the end"),
        (flipped(packed, middle), "is damaged: gzip says"),
        (flipped(packed, len(packed) - 6), "incorrect data check"),
        (packed[:middle] + packed[-8:], "is damaged: gzip says"),
        (packed[:20] + packed[-8:], "is damaged: gzip says"),
        (packed + b"junk" + packed[-4:], "8 bytes follow the end"),
    ):
        assert fault in assert_same(path, packed + behind)[0]
    # Sound members behind it, of the very length or none, are no fault
    for behind in (packed, gzip.compress(b""), packed + gzip.compress(b""), bytes(4)):
        assert np.array_equal(assert_same(path, packed + behind), VALUES)


NAME, EXTRA, COMMENT = 8, 4, 16


def with_gzip_header(packed: bytes, flags: int, between: bytes) -> bytes:
    """The one member with more in its own header, behind the ten bytes that each has."""
    assert packed[3] == 0
    return packed[:3] + bytes([flags]) + packed[4:10] + between + packed[10:]


def test_voxels_that_begin_far_into_the_file_are_found(tmp_path: Path, packed: bytes) -> None:
    path, empty = tmp_path / "a.nii.gz", gzip.compress(b"", mtime=0)
    plain = gzip.decompress(packed)
    long_name, extra = b"n" * 20_000 + b"\0", b"\xff\xff" + b"x" * 0xFFFF
    for blob in (
        empty + packed,
        empty * 900 + packed,
        empty + bytes(9000) + packed,
        gzip.compress(plain[:100]) + gzip.compress(plain[100:]),
        b"".join(gzip.compress(plain[at : at + 1], 0) for at in range(600)) + gzip.compress(plain[600:]),
        with_gzip_header(packed, NAME, long_name),
        with_gzip_header(packed, EXTRA, extra),
        with_gzip_header(packed, EXTRA | NAME | COMMENT, extra + long_name * 2),
    ):
        assert np.array_equal(assert_same(path, blob), VALUES)
        alone = tmp_path / "b.nii.gz"
        alone.write_bytes(blob)
        assert read_header(alone).shape == VALUES.shape


def test_a_beginning_without_an_end_is_one_sentence(tmp_path: Path, packed: bytes) -> None:
    path, empty = tmp_path / "a.nii.gz", gzip.compress(b"", mtime=0)
    for blob, fault in (
        (empty, "is not a NIfTI file"),
        (empty * 900, "is not a NIfTI file"),
        (empty + b"junk" * 5000, "20,000 bytes follow the end"),
        (empty + packed[:300], "end too early"),
        (packed[:3] + bytes([NAME]) + packed[4:10] + b"n" * 50_000, "end too early"),
        (empty + flipped(packed, 300), "is damaged: gzip says"),
    ):
        assert fault in assert_same(path, blob)[0]
    path.write_bytes(empty * 900)
    with pytest.raises(DataError, match="is not a NIfTI file"):
        read_header(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), mask=st.integers(1, 255))
def test_a_flipped_byte_is_told_alike(tmp_path: Path, packed: bytes, place: int, mask: int) -> None:
    blob = bytearray(packed)
    blob[place % len(blob)] ^= mask
    assert_same(tmp_path / "a.nii.gz", bytes(blob))


def test_a_header_is_read_once_and_anew_when_the_file_changes(
    tmp_path: Path, packed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.nii.gz", []
    genuine = nifti._bytes_of
    monkeypatch.setattr(nifti, "_bytes_of", lambda *given, **named: opened.append(1) or genuine(*given, **named))
    monkeypatch.setattr(seen_files, "_JUST_NOW_NS", 0)
    path.write_bytes(packed)
    assert read_file(path).header.shape == VALUES.shape
    assert read_header(path).shape == read_header(path).shape == VALUES.shape
    assert len(opened) == 1
    time.sleep(0.02)
    save(path, VALUES[:, :, :8])
    assert read_header(path).shape == (24, 20, 8)
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        read_header(path)


def test_a_header_of_a_file_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    """Two changes within one tick of the file system's clock would look like one."""
    path = save(tmp_path / "a.nii", VALUES)
    kept = os.stat(path)
    assert read_header(path).shape == VALUES.shape
    save(path, VALUES.transpose(2, 1, 0).copy())
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert read_header(path).shape == VALUES.shape[::-1]
