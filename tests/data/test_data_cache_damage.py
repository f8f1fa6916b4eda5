"""Damaged entries, and damaged databases, are noticed and built anew with one line, whatever happened to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
import torch
from cache_checks import RECIPE, assert_true, opened_with_lines, write_cases

import fasttrain.data.caches.keys as keys
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case

STORED = ["disk", "lmdb"]
ALL_THERE = "4 of 4 cases were there"


@pytest.fixture
def cases(tmp_path: Path) -> tuple[Case, ...]:
    return write_cases(tmp_path / "set", 4)


def entries_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.volume"))


def _cut_to(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def _flipped(place: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        blob = bytearray(path.read_bytes())
        blob[int(place * (len(blob) - 1))] ^= 0x10
        path.write_bytes(bytes(blob))

    return flip


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _cut_to(0),
    "in the prefix": _cut_to(20),
    "after the prefix": _cut_to(32),
    "in the header": _cut_to(300),
    "in the data": _cut_to(5000),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit": _flipped(0.0),
    "length": lambda path: path.write_bytes(path.read_bytes()[:20] + b"\xff" + path.read_bytes()[21:]),
    "header bit": _flipped(0.01),
    "data bit": _flipped(0.5),
    "last bit": _flipped(1.0),
    "text": lambda path: path.write_text("not ours\n" * 50),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "torch file": lambda path: torch.save({"image": torch.ones(3)}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_disk_entry_is_built_anew_with_one_line(cases: tuple[Case, ...], damage: str, tmp_path: Path) -> None:
    open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    for path in entries_of(tmp_path)[1:3]:
        DAMAGES[damage](path)
    source, lines, warnings = opened_with_lines("disk", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "2 of 4" in lines[0]
    assert len(warnings) == 1
    assert str(entries_of(tmp_path)[1]) in warnings[0]
    assert "and 1 more like it; built anew" in warnings[0]
    assert_true(source, cases, Preprocess(RECIPE))
    assert ALL_THERE in opened_with_lines("disk", cases, Preprocess(RECIPE), tmp_path / "cache")[1][0]


def test_an_entry_under_another_cases_name_is_not_believed(cases: tuple[Case, ...], tmp_path: Path) -> None:
    open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    entries = entries_of(tmp_path)
    shutil.copy(entries[0], entries[1])
    source, lines, _ = opened_with_lines("disk", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert_true(source, cases, Preprocess(RECIPE))


def test_foreign_files_in_the_folder_are_left_alone(cases: tuple[Case, ...], tmp_path: Path) -> None:
    open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    folder = entries_of(tmp_path)[0].parent
    (folder / "notes.txt").write_text("mine")
    (folder / "other.volume").write_bytes(b"mine")
    source, lines, warnings = opened_with_lines("disk", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert ALL_THERE in lines[0]
    assert warnings == []
    assert (folder / "notes.txt").read_text() == "mine"
    assert_true(source, cases, Preprocess(RECIPE))


def test_entries_deleted_or_replaced_while_a_source_is_open_do_not_matter(
    cases: tuple[Case, ...], tmp_path: Path
) -> None:
    for kind in STORED:
        source = open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / kind)
        shutil.rmtree(tmp_path / kind)
        assert_true(source, cases, Preprocess(RECIPE))


def test_what_is_written_to_a_sample_stays_out_of_the_entry(cases: tuple[Case, ...], tmp_path: Path) -> None:
    for kind in STORED:
        open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / kind)[0].image.fill_(7)
        source, lines, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / kind)
        assert ALL_THERE in lines[0]
        assert warnings == []
        assert_true(source, cases, Preprocess(RECIPE))


LMDB_DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _cut_to(0),
    "in the first page": _cut_to(100),
    "one page": _cut_to(4096),
    "two pages": _cut_to(8192),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "text": lambda path: path.write_text("not ours\n" * 5000),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", LMDB_DAMAGES)
def test_a_damaged_database_is_built_anew_with_one_line(cases: tuple[Case, ...], damage: str, tmp_path: Path) -> None:
    open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    (database,) = tmp_path.rglob("data.mdb")
    LMDB_DAMAGES[damage](database)
    source, lines, warnings = opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "0 of 4" in lines[0]
    assert len(warnings) == 1
    assert str(database.parent) in warnings[0]
    assert_true(source, cases, Preprocess(RECIPE))
    assert list(tmp_path.rglob("*.damaged")) == []
    assert ALL_THERE in opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")[1][0]


@pytest.mark.parametrize("wrong", [b"", b"x" * 10, b"not ours" * 5000, None], ids=["empty", "short", "text", "bit"])
def test_a_damaged_lmdb_entry_is_built_anew_with_one_line(
    cases: tuple[Case, ...], wrong: bytes | None, tmp_path: Path
) -> None:
    first = open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    (database,) = tmp_path.rglob("data.mdb")
    with lmdb.open(str(database.parent), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        place = keys.place_of(cases[2]).encode()
        blob = bytearray(transaction.get(place))
        blob[len(blob) // 2] ^= 1
        transaction.put(place, bytes(blob) if wrong is None else wrong)
    assert_true(first, cases, Preprocess(RECIPE))  # an open source does not believe it either
    source, lines, warnings = opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert len(warnings) == 1
    assert cases[2].name in warnings[0]
    assert_true(source, cases, Preprocess(RECIPE))


@pytest.mark.parametrize("pages", [range(2, 3), range(3, 4), range(2, 6)], ids=["page 2", "page 3", "pages 2 to 5"])
def test_a_database_with_zeroed_pages_is_built_anew(cases: tuple[Case, ...], pages: range, tmp_path: Path) -> None:
    open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache").close()
    (database,) = tmp_path.rglob("data.mdb")
    with open(database, "r+b") as stream:
        stream.seek(4096 * pages.start)
        stream.write(bytes(4096 * len(pages)))
    # A case that is no longer the one that is stored has to be written into what is there
    os.utime(cases[0].images[0], (1, 1))
    source, _, _ = opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert_true(source, cases, Preprocess(RECIPE))
    source.close()
    again, lines, warnings = opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert ALL_THERE in lines[0]
    assert warnings == []
    assert_true(again, cases, Preprocess(RECIPE))


@pytest.mark.parametrize("name", ["lock.mdb", "data.mdb"])
def test_nothing_is_written_through_a_link(cases: tuple[Case, ...], name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me\n" * 2000)
    open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache").close()
    (place,) = (tmp_path / "cache").rglob(name)
    place.unlink()
    place.symlink_to(precious)
    source, _, _ = opened_with_lines("lmdb", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert_true(source, cases, Preprocess(RECIPE))
    assert precious.read_text() == "keep me\n" * 2000


@pytest.mark.parametrize("kind", STORED)
def test_other_content_of_the_same_size_and_time_is_not_taken_for_the_old(
    kind: str, cases: tuple[Case, ...], tmp_path: Path
) -> None:
    open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache").close()
    image = cases[0].images[0]
    before, blob = os.stat(image), bytearray(image.read_bytes())
    blob[-2] ^= 0x40
    image.write_bytes(bytes(blob))
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    source, lines, _ = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert_true(source, cases, Preprocess(RECIPE))
