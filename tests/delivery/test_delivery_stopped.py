"""A prediction or an evaluation that a signal stops says so, leaves nothing half-made, and the same command goes on with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.delivery.done_before import RECORD
from fasttrain.engine.run import RunResult

CASES = 40


def stopped(number: signal.Signals, words: list[str], folder: Path, ready: Callable[[], bool]) -> tuple[int, str]:
    """The exit code and the last line of a command that is signalled once it is `ready`."""
    with start(words, folder) as process:
        try:
            until = time.monotonic() + 60
            while not ready():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until
                time.sleep(0.005)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "Traceback" not in err
    return process.returncode, err.splitlines()[-1]


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    (folder / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
    command = [sys.executable, "-m", "fasttrain", *words, "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def given(phantoms: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    for number in range(CASES):
        os.link(phantoms / "imagesTr/phantom_000.nii.gz", folder / f"case_{number:02}.nii.gz")
    return folder


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGHUP, 143, "SIGHUP")])
def test_a_prediction(
    whole_run: RunResult, given: Path, number: signal.Signals, code: int, name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["predict", str(whole_run.run), str(given), str(out)]
    ended, said = stopped(number, words, tmp_path, lambda: (out / "case_00.nii.gz").exists())
    expected = "predictions that are done are kept, and the same command goes on"
    assert (ended, said) == (code, f"fasttrain: stopped by {name}; {expected}")
    done = {path.name for path in out.iterdir()} - {RECORD}
    assert 0 < len(done) < CASES
    assert all(one.startswith("case_") for one in done)
    with start(words, tmp_path) as again:
        written, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert len(written.splitlines()) == CASES - len(done)
    assert {path.name for path in out.iterdir()} == {RECORD, *(path.name for path in given.iterdir())}
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_evaluation(whole_run: RunResult, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["evaluate", str(whole_run.run), "--part", "training", "--out", str(out)]
    ended, said = stopped(signal.SIGTERM, words, tmp_path, out.exists)
    assert (ended, said) == (143, "fasttrain: stopped by SIGTERM; no scores were written")
    assert list(out.iterdir()) == []
    with start(words, tmp_path) as again:
        _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert {"cases.csv", "evaluation.json"} < {path.name for path in out.iterdir()}
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stderr_does_not_change_the_exit_code(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    os.link(phantoms / "imagesTr/phantom_000.nii.gz", tmp_path / "given/a.nii.gz")
    (tmp_path / "given/b.nii.gz").write_text("no volume")
    predict = ["predict", str(whole_run.run), str(tmp_path / "given"), str(tmp_path / "out")]
    export = ["export", str(whole_run.run), "--format", "torchscript", "--out", str(tmp_path / "model.ts")]
    for words, code, made in ((predict, 3, tmp_path / "out/a.nii.gz"), (export, 0, tmp_path / "model.ts")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "fasttrain", *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (code, f"{made}\n")
