"""Where caches lie, and the form of an entry: what goes in comes out, and nothing else comes out."""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_builders import make_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fasttrain.data.caches import volumes_folder
from fasttrain.data.caches.entry import _LENGTHS, _PREFIX, UnreadableEntryError, pack, unpack
from fasttrain.machine.cache_folder import cache_folder, is_kept
from fasttrain.recipe.data_spec import CacheSpec

RUNS = Path("/work space/runs")
KEPT: dict[str, Any] = {"lasts": lambda folder: True}
LOST: dict[str, Any] = {"lasts": lambda folder: False}


def test_fasttrain_cache_comes_first_whatever_home_is() -> None:
    environ = {"FASTTRAIN_CACHE": "/fast/cache", "HOME": "/home/a", "XDG_CACHE_HOME": "/x"}
    assert cache_folder(environ, RUNS, **LOST) == (Path("/fast/cache"), "$FASTTRAIN_CACHE")
    assert cache_folder({**environ, "FASTTRAIN_CACHE": "here"}, RUNS)[0] == Path.cwd() / "here"
    assert cache_folder({**environ, "FASTTRAIN_CACHE": ""}, RUNS, **KEPT)[0] == Path("/x/fasttrain")


def test_the_users_folder_where_it_is_kept_else_beside_the_runs() -> None:
    assert cache_folder({"HOME": "/home/a"}, RUNS, **KEPT)[0] == Path("/home/a/.cache/fasttrain")
    assert cache_folder({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, RUNS, **KEPT)[0].parts[1] == "home"
    beside, why = cache_folder({"HOME": "/home/a"}, RUNS, **LOST)
    assert beside == RUNS / ".fasttrain-cache"
    assert "/home/a/.cache" in why
    assert cache_folder({}, RUNS, **KEPT) == (beside, "beside the runs, since HOME is not set")
    assert cache_folder({}, Path("runs"))[0] == Path.cwd() / "runs" / ".fasttrain-cache"


def test_what_is_kept_is_told_by_the_deepest_mount(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    pod = "27 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/a\n"
    disk = "27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/sda rw\n"
    assert not is_kept(tmp_path, pod)
    assert is_kept(tmp_path, disk)
    escaped = str(spaced.resolve()).replace(" ", "\\040")
    volume = pod + f"90 27 8:17 /data {escaped} rw - xfs /dev/sdb rw\n"
    assert is_kept(spaced / "not" / "yet" / "there", volume)
    assert not is_kept(tmp_path, volume)
    assert not is_kept(spaced, volume + f"91 27 0:40 / {escaped} rw - tmpfs tmpfs rw\n")  # mounted over it
    assert is_kept(tmp_path, "damaged\n\n27 1 0:21 / / rw overlay overlay rw\n - \n")
    link = tmp_path / "link"
    link.symlink_to(spaced)
    assert is_kept(link, volume)


def test_what_cannot_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = "27 1 254:0 / / rw,relatime - ext4 /dev/sda rw\n"
    assert is_kept(tmp_path / "new", disk)
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)  # root may write anywhere
    assert not is_kept(tmp_path / "new", disk)


def test_the_recipe_may_name_the_folder() -> None:
    assert volumes_folder(CacheSpec(folder="/v"), {"FASTTRAIN_CACHE": "/c"}, RUNS) == Path("/v")
    assert volumes_folder(CacheSpec(folder="~/v"), {}, RUNS) == Path.home() / "v"
    assert volumes_folder(CacheSpec(), {"FASTTRAIN_CACHE": "/c"}, RUNS) == Path("/c/volumes")
    assert make_recipe(cache={"kind": "lmdb", "folder": "v"}).data.cache.folder == "v"
    with pytest.raises(ValidationError):
        CacheSpec(folder="")


def blob_of(record: dict[str, Any], key: str = "k") -> np.ndarray:
    return np.frombuffer(b"".join(pack(record, key)), np.uint8).copy()


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8"))
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
TENSORS = st.builds(
    lambda shape, dtype, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
VALUES = st.recursive(
    SCALARS | TENSORS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
RECORDS = st.dictionaries(st.sampled_from(["tensor", "dict", "key", "image", "ü", ""]), VALUES)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        assert one.untyped_storage().nbytes() == one.nbytes
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@settings(deadline=None, max_examples=150)
@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: dict[str, Any]) -> None:
    assert same(unpack(blob_of(record), "k"), record)
    assert unpack(blob_of(record), "another key") is None


@settings(deadline=None, max_examples=150)
@given(RECORDS, st.data())
def test_one_changed_byte_or_another_length_is_noticed(record: dict[str, Any], data: st.DataObject) -> None:
    blob = blob_of(record)
    changed = blob.copy()
    changed[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    for damaged in (changed, blob[: data.draw(st.integers(0, len(blob) - 1))].copy(), np.append(blob, np.uint8(0))):
        with pytest.raises(UnreadableEntryError):
            unpack(damaged, "k")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_other_bytes_are_no_entry(noise: bytes) -> None:
    with pytest.raises(UnreadableEntryError):
        unpack(np.frombuffer(noise + b" ", np.uint8)[:-1], "k")


@pytest.mark.parametrize(
    "header",
    [
        {"tensor": "uint8", "shape": [64], "begin": 1},
        {"tensor": "uint8", "shape": [65], "begin": 0},
        {"tensor": "uint8", "shape": [-1], "begin": 8},
        {"tensor": "uint8", "shape": [1], "begin": -1},
        {"tensor": "object", "shape": [1], "begin": 0},
        {"tensor": "uint8", "shape": "8", "begin": 0},
        {"tensor": "uint8"},
        {},
    ],
    ids=str,
)
def test_a_made_up_header_with_the_right_checksum_reaches_no_other_memory(header: dict[str, Any]) -> None:
    text = json.dumps({"key": "k", "record": {"dict": {"image": header}}}).encode()
    rest = text + bytes(64)
    length = _PREFIX.size + len(rest)
    checksum = zlib.crc32(rest, zlib.crc32(_LENGTHS.pack(length, len(text))))
    blob = _PREFIX.pack(b"fasttrain vol 1\n", length, len(text), checksum) + rest
    with pytest.raises(UnreadableEntryError, match="header"):
        unpack(np.frombuffer(bytearray(blob), np.uint8), "k")


@pytest.mark.parametrize("value", [(1, 2), np.float64(1.0), {1: 2}, torch.nn.Parameter(torch.ones(1)), Path("x"), b"x"])
def test_what_would_come_back_as_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        pack({"value": value}, "k")
