"""What else may lie in the place of a file of the cache: links, pipes, folders, forged facts; nothing hangs."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from cache_checks import RECIPE, assert_true, opened_with_lines, write_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fasttrain.data import centres as centres_module
from fasttrain.data.caches import open_case_source
from fasttrain.data.centres import CENTRES_PER_CLASS, background_centres, class_centres
from fasttrain.data.checking.facts import View
from fasttrain.data.checking.remembered import Remembered, _code, _digest, stamp_of
from fasttrain.data.inventory import note_use, read_note
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import StorageError
from fasttrain.machine.folder_lock import LOCK_FILE, alone, hold
from fasttrain.samples import Case

IMAGE = View(3)


@pytest.fixture
def cases(tmp_path: Path) -> tuple[Case, ...]:
    return write_cases(tmp_path / "set", 4)


def entry_of(folder: Path) -> Path:
    return sorted(folder.rglob("*.volume"))[0]


@pytest.mark.parametrize("odd", ["folder", "pipe", "link"])
def test_an_entry_that_is_no_file_is_replaced(cases: tuple[Case, ...], odd: str, tmp_path: Path) -> None:
    open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache").close()
    entry, precious = entry_of(tmp_path), tmp_path / "precious"
    precious.write_text("keep me")
    entry.unlink()
    {"folder": entry.mkdir, "pipe": lambda: os.mkfifo(entry), "link": lambda: entry.symlink_to(precious)}[odd]()
    source, lines, _ = opened_with_lines("disk", cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert_true(source, cases, Preprocess(RECIPE))
    assert precious.read_text() == "keep me"
    assert entry.is_file()
    assert not entry.is_symlink()


def test_a_folder_with_content_in_the_place_of_an_entry_is_named(cases: tuple[Case, ...], tmp_path: Path) -> None:
    open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache").close()
    entry = entry_of(tmp_path)
    entry.unlink()
    (entry / "mine").mkdir(parents=True)
    with pytest.raises(StorageError, match="is no regular file, in the place of a file of the cache") as caught:
        open_case_source("disk", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    assert str(entry) in str(caught.value)
    assert "free some space" not in str(caught.value)


def test_the_lock_of_a_folder_is_not_made_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / LOCK_FILE).symlink_to(target)
    held = hold(tmp_path)
    with alone(tmp_path) as taken:
        assert taken == "a running process uses it"
    held.release()
    assert not target.exists()
    (tmp_path / LOCK_FILE).unlink()
    os.mkfifo(tmp_path / LOCK_FILE)
    with alone(tmp_path) as taken:
        assert taken is None


def test_a_pipe_in_the_place_of_a_note_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "about.json")
    assert read_note(tmp_path) is None
    note_use(tmp_path, "recipe", "/data", "training", "float32")
    note = read_note(tmp_path)
    assert note is not None
    assert note.recipes == ("recipe",)


REMEMBERED = """
    import sys
    from pathlib import Path
    from fasttrain.data.checking.remembered import Remembered
    remembered = Remembered(Path(sys.argv[1]), Path(sys.argv[2]))
    print(len(remembered._files))
"""


def test_a_pipe_in_the_place_of_the_facts_does_not_hang(tmp_path: Path) -> None:
    path = Remembered(tmp_path, tmp_path).path
    path.parent.mkdir()
    os.mkfifo(path)
    command = [sys.executable, "-c", textwrap.dedent(REMEMBERED), str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


SOUND = {
    "faults": [],
    "shape": [2, 3, 4],
    "affine": [float(one) for one in np.eye(4).reshape(-1)],
    "dtype": "float32",
    "scale": [1.0, 0.0],
    "channels": [{"minimum": 0.0, "maximum": 1.0, "nans": 0, "infinite": 0}],
    "digest": "00",
    "values": None,
    "resampled": None,
}


def remembering(folder: Path, file: Path, facts: object) -> Remembered:
    """A memory of forged facts, whose digest is right."""
    body = json.dumps({str(file): {"stamp": stamp_of(file), "given": str(file), "facts": {IMAGE.key: facts}}}).encode()
    head = {"format": "fasttrain check 1", "code": _code(), "digest": _digest(body)}
    path = Remembered(folder, folder).path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)
    return Remembered(folder, folder)


def test_facts_are_believed_where_they_are_facts(tmp_path: Path) -> None:
    file = tmp_path / "image.nii"
    file.write_bytes(b"x")
    facts = remembering(tmp_path, file, SOUND).facts(file, IMAGE)
    assert facts is not None
    assert facts.record() == {**SOUND, **{key: tuple(SOUND[key]) for key in ("faults", "shape", "affine", "scale")},
                              "channels": tuple(SOUND["channels"])}  # fmt: skip
    assert facts.channels[0].maximum == 1.0


@pytest.mark.parametrize(
    "forged",
    [
        {**SOUND, "shape": "234"},
        {**SOUND, "shape": [2, 3, "4"]},
        {**SOUND, "shape": [2, 0, 4]},
        {**SOUND, "affine": [1.0]},
        {**SOUND, "dtype": "no type"},
        {**SOUND, "dtype": 3},
        {**SOUND, "scale": [1.0]},
        {**SOUND, "channels": [{"minimum": "a", "maximum": 1.0, "nans": 0, "infinite": 0}]},
        {**SOUND, "channels": [1]},
        {**SOUND, "values": [[1, 2, 3]]},
        {**SOUND, "values": {"1": 2}},
        {**SOUND, "digest": None},
        {**SOUND, "faults": [None]},
        {},
        [],
        None,
    ],
)
def test_forged_facts_are_not_remembered(tmp_path: Path, forged: object) -> None:
    file = tmp_path / "image.nii"
    file.write_bytes(b"x")
    assert remembering(tmp_path, file, forged).facts(file, IMAGE) is None


def test_other_content_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "image.nii"
    file.write_bytes(b"x")
    seen, remembered = os.stat(file), remembering(tmp_path, file, SOUND)
    file.write_bytes(b"y")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert os.stat(file).st_mtime_ns == seen.st_mtime_ns
    assert remembered.facts(file, IMAGE) is None


@settings(max_examples=60, deadline=None)
@given(
    label=arrays.arrays(np.uint8, arrays.array_shapes(min_dims=2, max_dims=3, max_side=12), elements=st.integers(0, 4)),
    most=st.integers(1, 40),
    slab=st.integers(1, 200),
)
def test_centres_found_slab_by_slab_are_those_of_the_whole(label: np.ndarray, most: int, slab: int) -> None:
    def thinned(indices: np.ndarray) -> list[int]:
        if len(indices) > most:
            indices = indices[np.arange(most) * len(indices) // most]
        return indices.tolist()

    image = label[None].astype(np.float32) - (np.arange(label.size).reshape(label.shape) % 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(centres_module, "CENTRES_PER_CLASS", most)
        patch.setattr("fasttrain.data.grids._SLAB_VOXELS", slab)
        found = class_centres(label, 3)
        background = background_centres(image, label, -1.5)
        as_float = class_centres(label.astype(np.float32), 3)
    flat = label.reshape(-1)
    assert [one.tolist() for one in found] == [thinned(np.flatnonzero(flat == value)) for value in (1, 2, 3)]
    assert [one.tolist() for one in as_float] == [one.tolist() for one in found]
    assert background.tolist() == thinned(np.flatnonzero((flat == 0) & (image.reshape(-1) > -1.5)))
    assert CENTRES_PER_CLASS == 10_000
