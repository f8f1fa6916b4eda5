"""Stored volumes are right on a full or read-only disk, under several processes at once, and after a kill."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_checks import RECIPE, assert_true, opened_with_lines, write_cases

from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case

STORED = ["disk", "lmdb"]


_ON_A_MOUNT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_checks import RECIPE, assert_true, write_cases
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import StorageError
import subprocess
cases = write_cases(Path({root!r}) / "set", 6, shape=(48, 48, 40))
mount, read_only = Path({root!r}) / "mount", {read_only!r}
for kind in ("disk", "lmdb"):
    if read_only:
        open_case_source(kind, cases[:3], Preprocess(RECIPE), 2, folder=mount)
if read_only:
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
for kind in ("disk", "lmdb"):
    if read_only:
        assert_true(open_case_source(kind, cases[:3], Preprocess(RECIPE), 2, folder=mount), cases[:3], Preprocess(RECIPE))
    try:
        open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=mount)
    except StorageError as error:
        print(error)
    if not read_only:
        assert not list(mount.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=16m", str(mount)], check=True)
        assert_true(open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=mount), cases, Preprocess(RECIPE))
        subprocess.run(["rm", "-rf", str(mount / kind)], check=True)
        subprocess.run(["mount", "-o", "remount,size=1m", str(mount)], check=True)
"""


def _on_a_mount(root: Path, mebibytes: int, read_only: bool) -> list[str]:
    """What opening both kinds on a small tmpfs says, in a mount namespace of its own."""
    (root / "mount").mkdir()
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs '{root / 'mount'}'"
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    program = _ON_A_MOUNT.format(tests=str(Path(__file__).parent), root=str(root), read_only=read_only)
    done = subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_said_with_what_is_needed_and_free(tmp_path: Path) -> None:
    lines = _on_a_mount(tmp_path, 1, read_only=False)
    assert len(lines) == 2
    for line in lines:
        assert re.search(
            r"cannot be written: No space left on device \(this volume needs [1-9]\d* KiB, \d+ \w+ are free\)", line
        )
        assert str(tmp_path / "mount") in line


def test_a_read_only_cache_serves_what_it_has(tmp_path: Path) -> None:
    lines = _on_a_mount(tmp_path, 16, read_only=True)
    assert len(lines) == 2
    assert all("cannot be written" in line for line in lines)


class Slow(Preprocess):
    def __call__(self, case: Case) -> dict[str, Any]:
        time.sleep(0.01)
        return super().__call__(case)


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)  # the pool of the parent's threads does not exist here
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("kind", STORED)
def test_processes_that_fill_one_cache_at_once_agree(kind: str, tmp_path: Path) -> None:
    cases = write_cases(tmp_path / "set", 12)
    preprocess = Slow(RECIPE)

    def fill() -> None:
        assert_true(open_case_source(kind, cases, preprocess, 2, folder=tmp_path / "cache"), cases, preprocess)

    children = [_forked(fill) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    source, lines, warnings = opened_with_lines(kind, cases, preprocess, tmp_path / "cache")
    assert "12 of 12" in lines[0]
    assert warnings == []
    assert_true(source, cases, preprocess)
    assert list(tmp_path.rglob("*.part")) == []


_BESIDE_ANOTHER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from cache_checks import RECIPE, assert_true, write_cases
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case
names = [f"case ü{{index}}.nii" for index in range(12)]
root = Path({root!r}) / "set"
cases = tuple(Case(name[:-4], (root / "images" / name,), root / "labels" / name) for name in names)
print("ready", flush=True)
sys.stdin.readline()
for kind in ("disk", "lmdb"):
    assert_true(open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=Path({root!r}) / "cache"), cases, Preprocess(RECIPE))
"""


def test_two_programs_that_begin_at_once_fill_one_cache(tmp_path: Path) -> None:
    cases = write_cases(tmp_path / "set", 12)
    program = _BESIDE_ANOTHER.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    command = [sys.executable, "-c", program]
    checkout = Path(__file__).resolve().parents[2]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, cwd=checkout, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        _, fault = process.communicate(timeout=120)
        assert process.returncode == 0, fault
    for kind in STORED:
        source, lines, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
        assert "12 of 12" in lines[0]
        assert warnings == []
        assert_true(source, cases, Preprocess(RECIPE))
    assert list(tmp_path.rglob("*.part")) == []


@pytest.mark.parametrize("kind", STORED)
def test_a_fill_killed_at_random_ten_times_leaves_the_truth(kind: str, tmp_path: Path) -> None:
    cases = write_cases(tmp_path / "set", 12, shape=(40, 40, 40))
    preprocess, draw = Slow(RECIPE), random.Random(0)
    killed = 0
    for _ in range(10):
        child = _forked(lambda: open_case_source(kind, cases, preprocess, 2, folder=tmp_path / "cache").close())
        time.sleep(draw.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    assert killed
    source, _, warnings = opened_with_lines(kind, cases, preprocess, tmp_path / "cache")
    assert warnings == []  # a kill leaves no damaged entry, only fewer of them
    assert_true(source, cases, preprocess)
    assert list(tmp_path.rglob("*.part")) == []
