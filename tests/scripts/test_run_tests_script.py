"""The runner of several pytest processes: every file runs once, a failure is its exit code, a signal ends all of it."""

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD, BAD = "def test_good(): pass\n", "def test_bad(): assert 1 == 2\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the runner and five files of good tests in two folders."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "run_tests.py", tmp_path / "scripts")
    for name in ("a/test_a0", "a/test_a1", "a/test_a2", "b/test_b0", "b/test_b1"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GOOD)
    return tmp_path


def started(checkout: Path) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        str(checkout / "scripts" / "run_tests.py"),
        "--jobs",
        "2",
        "--files",
        "2",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.Popen(words, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_every_file_runs_once_and_one_failure_fails_all(checkout: Path) -> None:
    runner = started(checkout)
    out, _ = runner.communicate(timeout=120)
    assert runner.returncode == 0, out
    assert out.splitlines()[-1].startswith("5 passed in ")
    (checkout / "tests" / "a" / "test_a1.py").write_text(BAD)
    runner = started(checkout)
    out, _ = runner.communicate(timeout=120)
    assert runner.returncode == 1
    assert "FAILED tests/a/test_a1.py::test_bad" in out.splitlines()[-2]
    assert out.splitlines()[-1].startswith("1 failed, 4 passed in ")


def test_a_file_that_cannot_be_collected_fails_too(checkout: Path) -> None:
    (checkout / "tests" / "b" / "test_b1.py").write_text("import no_such_module\n")
    runner = started(checkout)
    out, _ = runner.communicate(timeout=120)
    assert runner.returncode == 1
    assert "ERROR tests/b/test_b1.py" in out.splitlines()[-2]


def test_a_signal_leaves_no_test_behind(checkout: Path) -> None:
    begun = checkout / "begun"
    text = f"import time, pathlib\ndef test_slow():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(100)\n"
    (checkout / "tests" / "a" / "test_a0.py").write_text(text)
    runner = started(checkout)
    try:
        while not begun.exists():
            assert runner.poll() is None
            time.sleep(0.02)
        below = psutil.Process(runner.pid).children(recursive=True)
        runner.terminate()
        runner.communicate(timeout=30)
    finally:
        runner.kill()
    assert runner.returncode == 143
    assert below
    assert not psutil.wait_procs(below, timeout=10)[1]


def test_all_files_of_this_checkout_are_in_exactly_one_group() -> None:
    script = "import run_tests; print(*(path for group in run_tests.groups(7) for path in group), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "scripts", capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py"))


def test_one_pytest_can_take_all_tests_too() -> None:
    """Python knows one module of a name: of two folders' `conftest` a test would import either."""
    tests = Path(__file__).parents[1]
    files = sorted(path for path in tests.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert len(files) > 100
    double = [name for name, count in Counter(path.stem for path in files).items() if count > 1]
    importing = [
        path.name for path in files if re.search(r"^\s*(from|import) conftest\b", path.read_text(), re.MULTILINE)
    ]
    assert (double, importing) == ([], [])
