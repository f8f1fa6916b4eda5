"""What is stored is listed with whose it is, and cleared without touching what is in use or not fasttrain's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cache_checks import RECIPE, assert_true, opened_with_lines, write_cases
from data_builders import make_recipe

from fasttrain.data.caches import open_case_source
from fasttrain.data.checking.facts import View, read_facts
from fasttrain.data.checking.remembered import Remembered, stamp_of
from fasttrain.data.inventory import Cleared, StoredSet, clear, find_sets, note_use, read_note
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.compiler import keep_compiled
from fasttrain.machine.folder_lock import IN_USE, LOCK_FILE, hold
from fasttrain.samples import Case

STORED = ["disk", "lmdb"]
NOT_OURS = b"somebody's own bytes, which are no volume"


@pytest.fixture
def cases(tmp_path: Path) -> tuple[Case, ...]:
    return write_cases(tmp_path / "set", 4)


def filled(kind: str, cases: tuple[Case, ...], folder: Path, training: bool = True) -> StoredSet:
    open_case_source(kind, cases, Preprocess(RECIPE, training), 2, folder=folder).close()
    part = "training" if training else "validation"
    (found,) = [one for one in find_sets(None, folder) if one.kind == kind and one.note and one.note.part == part]
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", STORED)
def test_a_set_is_listed_with_whose_it_is(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    volumes = tmp_path / "cache" / "volumes"
    one = filled(kind, cases, volumes)
    assert one.note is not None
    assert (one.kind, one.entries, one.note.part, one.note.dtype) == (kind, 4, "training", "float16")
    assert (one.note.recipes, one.note.data) == (("made",), (str(tmp_path / "set"),))
    assert one.bytes == sum(path.stat().st_size for path in files_of(volumes) if path.name != LOCK_FILE)
    assert abs(one.last_used - (one.path / "about.json").stat().st_mtime) < 1e-3
    other = make_recipe(**RECIPE.data.model_dump(), recipe_name="other", patch=RECIPE.patch.model_dump())
    open_case_source(kind, cases[:2], Preprocess(other), 1, folder=volumes).close()
    filled(kind, cases, volumes, training=False)
    found = find_sets(None, volumes)
    assert sorted((found_one.note.part, found_one.note.recipes) for found_one in found if found_one.note) == [
        ("training", ("made", "other")),
        ("validation", ("made",)),
    ]


def test_each_opening_is_a_use(cases: tuple[Case, ...], tmp_path: Path) -> None:
    one = filled("disk", cases, tmp_path / "cache")
    os.utime(one.path / "about.json", (1e9, 1e9))
    assert find_sets(None, tmp_path / "cache")[0].last_used == 1e9
    assert filled("disk", cases, tmp_path / "cache").last_used > 1.7e9


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipes": 3}', "null", '{"recipes": [1], "data": []}'])
def test_a_note_that_is_none_costs_nothing(cases: tuple[Case, ...], text: str, tmp_path: Path) -> None:
    one = filled("disk", cases, tmp_path / "cache")
    (one.path / "about.json").write_text(text)
    assert read_note(one.path) is None
    (found,) = find_sets(None, tmp_path / "cache")
    assert (found.entries, found.note) == (4, None)
    assert filled("disk", cases, tmp_path / "cache").note == one.note or one.note is not None


def test_a_name_that_is_no_unicode_is_noted(tmp_path: Path) -> None:
    note_use(tmp_path, "r", os.fsdecode(b"/data/\xff"), "training", "float32")
    note = read_note(tmp_path)
    assert note is not None
    assert note.data == (os.fsdecode(b"/data/\xff"),)


@pytest.mark.parametrize("kind", STORED)
def test_clearing_leaves_nothing_of_ours(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    one = filled(kind, cases, tmp_path / "cache")
    assert clear([one]) == [Cleared(one, one.bytes, None)]
    assert files_of(tmp_path / "cache") == []
    assert find_sets(None, tmp_path / "cache") == []
    source, lines, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "0 of 4" in lines[0]
    assert warnings == []
    assert_true(source, cases, Preprocess(RECIPE))


@pytest.mark.parametrize("kind", STORED)
def test_what_fasttrain_did_not_write_stays(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    volumes = tmp_path / "cache"
    one = filled(kind, cases, volumes)
    strangers = [
        one.path / "notes.txt",
        one.path / "mine.volume",
        one.path / f"{'a' * 32}.volume",  # the name of an entry, but not its first bytes
        one.path / "mine" / "deep.volume",
        volumes / kind / "data.mdb",
        volumes / kind / "my models" / "data.mdb",
        volumes / f"{'b' * 32}.volume",
        volumes / "other" / ("c" * 32) / "data.mdb",
        volumes / "lmdb" / ("d" * 32) / "data.mdb",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(NOT_OURS)
    (one.path / "link.volume").symlink_to(strangers[0])
    (volumes / kind / ("e" * 32)).symlink_to(tmp_path / "set")
    found = find_sets(tmp_path, volumes)
    assert [stored.path for stored in found] == [one.path]
    (done,) = clear(found)
    assert (done.left, done.freed_bytes, done.others) == (None, one.bytes, 5)
    assert sorted([*strangers, one.path / "link.volume"]) == files_of(volumes)
    assert all(path.read_bytes() == NOT_OURS for path in strangers)
    assert len(files_of(tmp_path / "set")) == 8


def test_damaged_and_half_written_entries_are_cleared(cases: tuple[Case, ...], tmp_path: Path) -> None:
    one = filled("disk", cases, tmp_path / "cache")
    entries = sorted(one.path.glob("*.volume"))
    os.truncate(entries[0], 0)
    os.truncate(entries[1], 7)
    entries[2].write_bytes(bytes(400))
    (one.path / f".{entries[3].name}.0123abcd.part").write_bytes(b"half")
    database = filled("lmdb", cases, tmp_path / "cache")
    aside = database.path.with_name(f"{database.path.name}.0123abcd.damaged")
    shutil.copytree(database.path, aside)
    (aside / "data.mdb").write_text("no sound database")
    found = find_sets(None, tmp_path / "cache")
    assert [stored.path for stored in found] == [one.path, database.path, aside]
    assert all(done.left is None for done in clear(found))
    assert files_of(tmp_path / "cache") == []


_FILLING = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_checks import RECIPE, write_cases
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess

class Slow(Preprocess):
    def __call__(self, case):
        print("building", flush=True)
        time.sleep(120)
        return super().__call__(case)

Slow.__module__, Slow.__qualname__ = Preprocess.__module__, Preprocess.__qualname__  # the same key
cases = write_cases(Path({root!r}) / "set", 5)
open_case_source({kind!r}, cases, Slow(RECIPE), 1, folder=Path({root!r}) / "cache")
"""


@pytest.mark.parametrize("kind", STORED)
def test_what_a_live_process_fills_is_left_and_what_a_killed_one_left_is_not(kind: str, tmp_path: Path) -> None:
    cases = write_cases(tmp_path / "set", 4)
    filled(kind, cases, tmp_path / "cache")
    program = _FILLING.format(tests=str(Path(__file__).parent), root=str(tmp_path), kind=kind)
    checkout = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", program], cwd=checkout, stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(90, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        before = files_of(tmp_path / "cache")
        (done,) = clear(find_sets(None, tmp_path / "cache"))
        assert (done.left, done.freed_bytes, done.failed) == (IN_USE, 0, False)
        assert files_of(tmp_path / "cache") == before
    finally:
        process.kill()
        process.wait()
        guard.cancel()
    (done,) = clear(find_sets(None, tmp_path / "cache"))
    assert done.left is None
    assert files_of(tmp_path / "cache") == []


def test_mapped_entries_of_an_open_source_stay_valid_when_cleared(cases: tuple[Case, ...], tmp_path: Path) -> None:
    source = open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    assert [done.left for done in clear(find_sets(None, tmp_path / "cache"))] == [None]
    assert files_of(tmp_path / "cache") == []
    assert_true(source, cases, Preprocess(RECIPE))


def test_a_database_is_left_while_a_source_reads_from_it(cases: tuple[Case, ...], tmp_path: Path) -> None:
    source = open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    child = os.fork()
    if child == 0:
        source.close()  # a forked worker's end is not the run's
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [done.left for done in clear(find_sets(None, tmp_path / "cache"))] == [IN_USE]
    source.close()
    assert [done.left for done in clear(find_sets(None, tmp_path / "cache"))] == [None]


def test_a_set_used_since_it_was_looked_at_is_left(cases: tuple[Case, ...], tmp_path: Path) -> None:
    one = filled("disk", cases, tmp_path / "cache")
    os.utime(one.path / "about.json", (1e9, 1e9))
    (done,) = clear([one])
    assert done.left == "it was used meanwhile"
    assert len(files_of(tmp_path / "cache")) == 5


def test_a_file_that_cannot_be_removed_is_named(
    cases: tuple[Case, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = filled("disk", cases, tmp_path / "cache")
    stubborn = sorted(one.path.glob("*.volume"))[2]
    genuine = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == stubborn:
            raise PermissionError(13, "Permission denied")
        genuine(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    (done,) = clear([one])
    assert done.failed
    assert done.left == f"{stubborn} cannot be removed (Permission denied)"
    assert done.freed_bytes == one.bytes - stubborn.stat().st_size


def test_filling_and_clearing_at_once_end_well(cases: tuple[Case, ...], tmp_path: Path) -> None:
    ended = threading.Event()

    def keep_clearing() -> None:
        while not ended.is_set():
            clear(find_sets(None, tmp_path / "cache"))

    clearer = threading.Thread(target=keep_clearing)
    clearer.start()
    try:
        for _ in range(5):
            for kind in STORED:
                source, _, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
                assert warnings == []
                assert_true(source, cases, Preprocess(RECIPE))
                source.close()
    finally:
        ended.set()
        clearer.join()


def test_compiled_code_is_held_while_its_process_lives(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "the user's")}
    keep_compiled(tmp_path, environ)
    kernel = tmp_path / "inductor" / "ab" / "kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"12345")
    (found,) = find_sets(tmp_path, tmp_path / "volumes")
    assert (found.kind, found.name, found.bytes, found.entries) == ("compiled", "inductor", 5, 1)
    assert [done.left for done in clear([found])] == [IN_USE]
    assert kernel.is_file()
    (tmp_path / "triton" / "deep").mkdir(parents=True)
    (tmp_path / "triton" / "deep" / "a.so").write_bytes(b"123")  # of a run that ended
    found_too = [one for one in find_sets(tmp_path, tmp_path / "volumes") if one.name == "triton"]
    assert [(done.left, done.freed_bytes) for done in clear(found_too)] == [(None, 3)]
    assert not (tmp_path / "triton").exists()


def test_what_the_check_remembers_is_listed_and_cleared(cases: tuple[Case, ...], tmp_path: Path) -> None:
    remembered = Remembered(tmp_path, tmp_path / "set")
    image = cases[0].images[0]
    view = View(3)
    remembered.note(image, view, stamp_of(image), read_facts(image, view))
    assert remembered.save() is None
    (tmp_path / "checks" / "mine-0123456789abcdef.json").write_text("{}")
    (found,) = find_sets(tmp_path, tmp_path / "volumes")
    assert (found.kind, found.entries, found.bytes) == ("checks", 1, remembered.path.stat().st_size)
    assert [(done.left, done.others) for done in clear([found])] == [(None, 1)]
    assert not remembered.path.exists()


def test_a_hold_on_what_cannot_be_written_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    held = hold(tmp_path / "file" / "folder")
    held.release()
    held.release()
    assert (tmp_path / "file").read_text() == ""


def test_listing_needs_neither_torch_nor_monai() -> None:
    program = (
        "import sys, json, fasttrain.data.inventory;"
        "print(json.dumps([name for name in ('torch', 'monai', 'nibabel', 'lmdb') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[2], capture_output=True)
    assert json.loads(done.stdout) == []
