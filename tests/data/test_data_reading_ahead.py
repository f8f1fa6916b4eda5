"""Files that are read before they are asked for: kept as far as there is room, taken once, and no fault told by the reader."""

import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain.data.nifti import read_file
from fasttrain.data.reading_ahead import reading_ahead
from fasttrain.data.seen_files import SEEN, key_of
from fasttrain.errors import DataError
from fasttrain.samples import Case


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    made = []
    for number in range(4):
        paths = []
        for part in ("image", "label"):
            path = tmp_path / f"{part}{number}.nii.gz"
            nib.save(nib.Nifti1Image(np.full((8, 8, 8), number, np.int16), np.eye(4)), path)
            paths.append(path)
        made.append(Case(str(number), (paths[0],), paths[1]))
    # Files changed within the last second are not kept
    time.sleep(1.1)
    return made


@pytest.fixture(autouse=True)
def forgotten():
    yield
    SEEN.forget()


def kept(cases: list[Case]) -> int:
    return sum(SEEN.has(key_of(path)) for case in cases for path in (*case.images, case.label))


def settled(cases: list[Case], wanted: int) -> None:
    end = time.monotonic() + 20
    while kept(cases) < wanted and time.monotonic() < end:
        time.sleep(0.01)


def test_every_file_is_kept_and_taken_once(cases: list[Case]) -> None:
    SEEN.keep(1 << 30)
    with reading_ahead(cases, 3):
        settled(cases, 8)
    assert kept(cases) == 8
    # What is taken is not read again by a further pass, and holds the file's own values
    assert (read_file(cases[2].images[0]).raw == 2).all()
    assert kept(cases) == 7


def test_no_more_than_there_is_room_for(cases: list[Case]) -> None:
    SEEN.keep(3 * 2000)
    with reading_ahead(cases, 2):
        settled(cases, 3)
    assert 1 <= kept(cases) <= 5
    assert SEEN.room_bytes >= 0


def test_nothing_is_read_where_nothing_is_kept(cases: list[Case]) -> None:
    with reading_ahead(cases, 2):
        time.sleep(0.05)
    assert kept(cases) == 0


def test_a_fault_is_for_whoever_asks(cases: list[Case]) -> None:
    broken = cases[0].images[0]
    broken.write_bytes(broken.read_bytes()[:60])
    time.sleep(1.1)
    SEEN.keep(1 << 30)
    with reading_ahead(cases, 2):
        settled(cases, 7)
    assert kept(cases) == 7
    with pytest.raises(DataError, match="image0"):
        read_file(broken)
