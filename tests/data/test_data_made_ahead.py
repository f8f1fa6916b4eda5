"""Volumes made by processes beside this one: the same records, once each, whatever becomes of the processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import psutil
import pytest
import torch

from fasttrain import load_recipe
from fasttrain.data.caches import open_case_source
from fasttrain.data.made_ahead import MadeAhead, can_make_ahead
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.seen_files import SEEN, key_of
from fasttrain.errors import DataError
from fasttrain.samples import Case

pytestmark = pytest.mark.skipif(not can_make_ahead(), reason="this system does not fork, or has no memfd")
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    made, draw = [], np.random.default_rng(0)
    for number in range(6):
        paths = tmp_path / f"image{number}.nii.gz", tmp_path / f"label{number}.nii.gz"
        nib.save(nib.Nifti1Image(draw.normal(size=(30 + number, 20, 24)).astype(np.float32), np.eye(4)), paths[0])
        nib.save(nib.Nifti1Image((draw.random((30 + number, 20, 24)) < 0.01).astype(np.uint8), np.eye(4)), paths[1])
        made.append(Case(str(number), (paths[0],), paths[1]))
    return made


@pytest.fixture
def preprocess() -> Preprocess:
    return Preprocess(load_recipe("demo", {"data.spacing": [1, 1, 2], "data.storage_dtype": "float16"}).recipe)


@pytest.fixture
def ahead(cases: list[Case], preprocess: Preprocess):
    made = MadeAhead([(case, preprocess) for case in cases], 3)
    yield made
    made.close()


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def test_the_records_are_those_of_this_process_and_come_once(
    ahead: MadeAhead, cases: list[Case], preprocess: Preprocess
) -> None:
    for case in reversed(cases):
        record = ahead.record(case, True)
        assert record is not None
        assert alike(record, preprocess(case))
        assert ahead.record(case, True) is None
    assert ahead.record(cases[0], False) is None, "nothing was begun for validation"


def test_a_plan_of_thousands_keeps_no_descriptor(ahead: MadeAhead, cases: list[Case]) -> None:
    before = psutil.Process().num_fds()
    records = [ahead.record(case, True) for case in cases]
    assert all(records)
    assert psutil.Process().num_fds() <= before
    # They outlive whoever made them
    ahead.close()
    assert all(float(record["image"].float().abs().sum()) > 0 for record in records if record)
    assert not children()


@pytest.mark.parametrize("kind", ["none", "memory"])
def test_a_source_takes_what_was_made_and_makes_the_rest(
    kind: str, ahead: MadeAhead, cases: list[Case], preprocess: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = open_case_source(kind, cases, preprocess, 2)
    ahead.record(cases[2], True)
    made_here, make = [], Preprocess.__call__
    monkeypatch.setattr(Preprocess, "__call__", lambda self, case: made_here.append(case.name) or make(self, case))
    source = open_case_source(kind, cases, preprocess, 2, ahead=ahead)
    for number in range(len(cases)):
        assert torch.equal(source[number].image, plain[number].image)
    assert [name for name in made_here if name == "2"], "given away before"
    assert set(made_here) <= {"2"} or kind == "none"


def test_a_fault_is_told_by_whoever_asks(cases: list[Case], preprocess: Preprocess) -> None:
    whole = cases[1].images[0].read_bytes()
    cases[1].images[0].write_bytes(whole[: len(whole) // 2])
    ahead = MadeAhead([(case, preprocess) for case in cases], 2)
    try:
        assert ahead.record(cases[1], True) is None
        assert ahead.record(cases[2], True) is not None
        with pytest.raises(DataError, match=r"image1\.nii\.gz"):
            open_case_source("memory", cases[1:2], preprocess, 1, ahead=ahead)
    finally:
        ahead.close()


def test_killed_processes_leave_the_rest_to_this_one(cases: list[Case], preprocess: Preprocess) -> None:
    class Slow(Preprocess):
        def __call__(self, case: Case) -> dict[str, Any]:
            time.sleep(0 if case.name == "0" else 60)
            return super().__call__(case)

    slow = Slow.__new__(Slow)
    slow.__dict__ = preprocess.__dict__
    ahead = MadeAhead([(case, slow) for case in cases], 2)
    assert ahead.record(cases[0], True) is not None
    for process in children():
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    assert all(process.is_running() for process in children()), "a signal to the group is the trainer's to answer"
    for process in children():
        process.kill()
    assert [ahead.record(case, True) for case in cases[1:]] == [None] * 5
    ahead.close()
    assert not children()


def test_they_end_with_the_process_that_began_them(tmp_path: Path) -> None:
    script = """
import sys, time
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.samples import Case
class Slow:
    training = True
    def __call__(self, case):
        time.sleep(60)
ahead = MadeAhead([(Case(str(n), (), None), Slow()) for n in range(4)], 2)
print(*ahead._children, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    makers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
    assert len(makers) == 2
    process.kill()
    process.wait()
    assert not psutil.wait_procs(makers, timeout=5)[1]


def test_files_that_were_kept_are_given_up(cases: list[Case], preprocess: Preprocess) -> None:
    time.sleep(1.1)  # files changed within the last second are not kept
    SEEN.keep(1 << 24)
    try:
        preprocess(cases[0])
        key = key_of(cases[0].images[0])
        assert SEEN.has(key)
        ahead = MadeAhead([(cases[0], preprocess)], 1)
        assert ahead.record(cases[0], True) is not None
        assert not SEEN.has(key)
        ahead.close()
    finally:
        SEEN.forget()
