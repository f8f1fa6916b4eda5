"""A run reads each file once: what the check read is taken by the cache, unless it changed, is too large, or nobody wants it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from data_builders import save

from fasttrain.data import nifti, seen_files
from fasttrain.data.nifti import read_file
from fasttrain.data.seen_files import SEEN, key_of

VALUES = np.random.default_rng(1).integers(-200, 900, (12, 10, 8)).astype(np.int16)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each file was opened."""
    counts: Counter[str] = Counter()
    genuine = nifti._bytes_of

    def counting(path: Path, limit: int = -1) -> bytes:
        counts[path.name] += 1
        return genuine(path, limit)

    monkeypatch.setattr(nifti, "_bytes_of", counting)
    monkeypatch.setattr(seen_files, "_JUST_NOW_NS", 0)
    yield counts
    SEEN.forget()


@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
def test_a_kept_file_is_taken_once(tmp_path: Path, name: str, opened: Counter[str]) -> None:
    path = save(tmp_path / name, VALUES)
    SEEN.keep(1 << 20)
    first = read_file(path)
    SEEN.stop_keeping()
    assert read_file(path) is first
    assert opened == {name: 1}
    again = read_file(path)
    assert again is not first
    assert np.array_equal(again.values(), VALUES)
    assert opened == {name: 2}


def test_nothing_is_kept_unasked_nor_after_it_was_forgotten(tmp_path: Path, opened: Counter[str]) -> None:
    path = save(tmp_path / "a.nii.gz", VALUES)
    read_file(path)
    read_file(path)
    assert opened == {"a.nii.gz": 2}
    SEEN.keep(1 << 20)
    read_file(path)
    SEEN.forget()
    read_file(path)
    read_file(path)
    assert opened == {"a.nii.gz": 5}


def test_a_file_that_changed_meanwhile_is_read_anew(tmp_path: Path, opened: Counter[str]) -> None:
    path = save(tmp_path / "a.nii.gz", VALUES)
    SEEN.keep(1 << 20)
    read_file(path)
    time.sleep(0.02)
    save(path, VALUES + 1)
    assert np.array_equal(read_file(path).values(), VALUES + 1)
    path.unlink()
    with pytest.raises(nifti.DataError, match="does not exist"):
        read_file(path)


def test_only_what_has_room_is_kept(tmp_path: Path, opened: Counter[str]) -> None:
    paths = [save(tmp_path / f"{number}.nii", VALUES) for number in range(4)]
    one = paths[0].stat().st_size
    SEEN.keep(2 * one + one // 2)
    for path in paths:
        read_file(path)
    SEEN.stop_keeping()
    for path in paths:
        read_file(path)
    assert sorted(opened.values()) == [1, 1, 2, 2]


def test_files_wider_than_what_is_made_of_them_are_not_kept(tmp_path: Path, opened: Counter[str]) -> None:
    path = save(tmp_path / "a.nii", VALUES.astype(np.float64))
    SEEN.keep(1 << 20)
    read_file(path)
    read_file(path)
    assert opened == {"a.nii": 2}


def test_a_file_changed_just_now_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.nii", VALUES)
    monkeypatch.setattr(seen_files, "_JUST_NOW_NS", 60_000_000_000)
    assert key_of(path) is None
    assert key_of(tmp_path / "none") is None
    monkeypatch.setattr(seen_files, "_JUST_NOW_NS", 0)
    assert key_of(path) is not None
