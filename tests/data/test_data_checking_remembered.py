"""What a check remembers: an unchanged set is not read again, and whatever is not surely its own is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checking_sets import check, classes, found, make_set, noise, put
from data_builders import make_recipe, write_decathlon

from fasttrain.data.caches import estimate_bytes
from fasttrain.data.checking.checking import without_bad_cases
from fasttrain.data.checking.facts import FileFacts, View, read_facts
from fasttrain.data.checking.remembered import Remembered, stamp_of
from fasttrain.data.checking.report import document_of, figures_of
from fasttrain.data.splits import Split
from fasttrain.errors import DataError

_CHECKED_WITHOUT_FILES = """
import resource, sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]).parent)]
from checking_sets import check
root, cache = Path(sys.argv[1]), Path(sys.argv[2])
held = []

def exhausted(done, files):
    if held:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    try:
        while True:
            held.append(open("/dev/null"))
    except OSError:
        pass

checked = check(root, cache, progress=exhausted)
held = None
print(*checked.faults, sep="\\n")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def memory_of(cache: Path) -> Path:
    (file,) = (cache / "checks").iterdir()
    return file


def test_an_unchanged_set_is_not_read_again(root: Path, cache: Path) -> None:
    first = check(root, cache)
    again = check(root, cache)
    assert (first.files, first.files_read) == (6, 6)
    assert (again.files, again.files_read) == (6, 0)
    one, other = document_of(first, None), document_of(again, None)
    for document in (one, other):
        del document["seconds"], document["files_read"]
    assert one == other


def test_nothing_is_written_beside_the_data(root: Path, cache: Path) -> None:
    before = {path: stamp_of(path) for path in root.rglob("*")}
    check(root, cache)
    assert {path: stamp_of(path) for path in root.rglob("*")} == before


def test_faults_of_voxels_are_remembered_too(root: Path, cache: Path) -> None:
    put(root, "c1", np.full((12, 10, 8), np.nan, np.float32), np.ones((12, 10, 8), np.uint8))
    first = check(root, cache)
    again = check(root, cache)
    assert again.files_read == 0
    assert first.faults == again.faults != ()


def test_a_file_that_could_not_be_read_is_read_again_and_others_are_not(root: Path, cache: Path) -> None:
    (root / "imagesTr/c1.nii.gz").write_bytes(b"")
    first = check(root, cache)
    again = check(root, cache)
    assert again.files_read == 1
    assert first.faults == again.faults != ()


def test_too_many_open_files_are_forgotten_when_there_are_fewer(root: Path, cache: Path) -> None:
    words = [sys.executable, "-c", _CHECKED_WITHOUT_FILES, str(root), str(cache), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert "cannot be read: Too many open files" in done.stdout, done.stderr
    assert check(root, cache).faults == ()


@pytest.mark.parametrize(("why", "skipped"), [("Permission denied", True), ("Too many open files", False)])
def test_too_many_open_files_make_no_case_bad(why: str, skipped: bool, root: Path, cache: Path) -> None:
    checked = check(root, cache, bad_cases="skip")
    cases = [one.case for one in checked.cases]
    split = Split(tuple(cases[:2]), tuple(cases[2:]))
    first = replace(checked.cases[0], faults=(f"{cases[0].images[0]} cannot be read: {why}",))
    checked = replace(checked, cases=(first, *checked.cases[1:]))
    if skipped:
        assert without_bad_cases(checked, split).train == (cases[1],)
    else:
        with pytest.raises(DataError, match=why):
            without_bad_cases(checked, split)


def test_full_reads_all_again(root: Path, cache: Path) -> None:
    check(root, cache)
    assert check(root, cache, full=True).files_read == 6


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_a_changed_file_is_read_again(change: str, root: Path, cache: Path) -> None:
    check(root, cache)
    path = root / "labelsTr/c1.nii.gz"
    before = stamp_of(path)
    assert before is not None
    if change == "size":
        put(root, "c1", noise(1), np.ones((12, 10, 8), np.uint8))
        os.utime(root / "imagesTr/c1.nii.gz", ns=(0, before[1]))
        os.utime(path, ns=(before[1], before[1]))
        assert stamp_of(path) != before
    else:
        os.utime(path, ns=(before[1], before[1] + 1))
    again = check(root, cache)
    assert again.files_read == (2 if change == "size" else 1)
    assert found(again)["c1"].voxels == ({0: 0, 1: 960, 2: 0} if change == "size" else {0: 640, 1: 160, 2: 160})


def test_another_spacing_reads_the_labels_alone(root: Path, cache: Path) -> None:
    check(root, cache)
    assert check(root, cache, spacing=[2.0, 2.0, 2.0]).files_read == 3
    assert check(root, cache, spacing=[2.0, 2.0, 2.0]).files_read == 0
    assert check(root, cache).files_read == 0


def test_what_the_recipe_says_is_judged_anew_without_reading(root: Path, cache: Path) -> None:
    assert check(root, cache).faults == ()
    strict = check(root, cache, classes={1: "liver"})
    assert strict.files_read == 0
    assert len(strict.faults) == 3
    assert all("2 in 160 voxels" in fault for fault in strict.faults)


DAMAGE = {
    "cut": lambda blob: blob[: len(blob) // 2],
    "empty": lambda blob: b"",
    "a digit altered": lambda blob: blob.replace(b"[12,10,8]", b"[12,10,9]"),
    "foreign": lambda blob: b'{"some": "document"}\n{}',
    "no text": lambda blob: os.urandom(500),
    "of other code": lambda blob: blob.replace(json.loads(blob.split(b"\n")[0])["code"].encode(), b"0" * 32),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_memory_is_no_memory(kind: str, root: Path, cache: Path) -> None:
    check(root, cache)
    file = memory_of(cache)
    damaged = DAMAGE[kind](file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    again = check(root, cache)
    assert again.files_read == 6
    assert (again.faults, again.warnings) == ((), ())
    assert check(root, cache).files_read == 0


def test_a_folder_that_cannot_be_written_is_one_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    checked = check(root, tmp_path / "cache")
    assert checked.faults == ()
    assert len(checked.warnings) == 1
    assert "is not remembered" in checked.warnings[0]
    assert "$FASTTRAIN_CACHE" in checked.warnings[0]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(root: Path, cache: Path) -> None:
    path, view = root / "imagesTr/c0.nii.gz", View(3)
    stamp, facts = stamp_of(path), read_facts(path, view)
    os.utime(path, ns=(1, 1))
    remembered = Remembered(cache, root)
    remembered.note(path, view, stamp, facts)
    assert remembered.facts(path, view) is None


def test_facts_come_back_as_they_were(root: Path) -> None:
    for path, view in (
        (root / "imagesTr/c0.nii.gz", View(3)),
        (root / "labelsTr/c0.nii.gz", View(3, True, (2.0,) * 3, "RAS")),
    ):
        facts = read_facts(path, view)
        assert FileFacts.of_record(json.loads(json.dumps(facts.record()))) == facts


def test_an_end_that_is_asked_for_keeps_what_was_read(root: Path, cache: Path) -> None:
    class EndedError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        assert total == 6
        if done == 2:
            raise EndedError

    with pytest.raises(EndedError):
        check(root, cache, progress=progress)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("check")] == []
    assert check(root, cache).files_read <= 4


def test_progress_is_told_from_the_thread_that_began(root: Path, cache: Path) -> None:
    heard: list[tuple[int, int]] = []
    own = threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == own
        heard.append((done, total))

    check(root, cache, progress=progress)
    assert heard == [(done, 6) for done in range(7)]


def test_a_file_name_that_is_no_utf8(tmp_path: Path, cache: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/s\xe9t \xe4"))
    make_set(root)
    assert check(root, cache).files_read == 6
    assert check(root, cache).files_read == 0


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"storage_dtype": "float16"},
        {"spacing": [2.0, 1.0, 0.5]},
        {"patch": {"size": [16, 16, 16], "background_above": 0.0}},
        {"patch": {"size": [48, 48, 48]}},
        {"orientation": "SPL", "spacing": [0.7, 1.0, 1.9]},
    ],
)
def test_the_size_of_the_cache_is_that_of_the_plan(data: dict, tmp_path: Path, cache: Path) -> None:
    root = write_decathlon(tmp_path / "set", ["a", "b", "c"], (12, 10, 8))
    checked = check(root, cache, **data)
    figures = figures_of(checked)
    assert figures is not None
    assert figures.memory_bytes == estimate_bytes([case.case for case in checked.cases], make_recipe(**data))


def test_the_figures(tmp_path: Path, cache: Path) -> None:
    root = make_set(tmp_path / "set")
    put(root, "c1", noise(1, (20, 10, 8)), classes((20, 10, 8)), image_affine=np.diag([2, 2, 2, 1.0]),
        label_affine=np.diag([2, 2, 2, 1.0]))  # fmt: skip
    figures = figures_of(check(root, cache))
    assert figures is not None
    assert (figures.cases, figures.median_shape, figures.median_spacing) == (3, (12, 10, 8), (1, 1, 1))
    assert figures.foreground_share == pytest.approx(960 / 3520)
    assert figures.voxels_by_value == {0: 2560, 1: 480, 2: 480}
    assert figures.smallest == ("c0", (12, 10, 8))
    assert figures.below_patch == 3
    assert figures.memory_bytes > figures.gpu_bytes
