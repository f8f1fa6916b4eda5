"""Too few open files or too little memory: the right sentence and exit code, and never a bug of fasttrain's own."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.cli import lacking
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.engine.failures import explained
from fasttrain.errors import DataError, FasttrainError, MachineError, ran_out_of_memory
from fasttrain.telemetry.events import RunStarted


def train_under(
    limit: str, values: dict, phantoms: Path, run: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    words = [
        sys.executable,
        "-m",
        "fasttrain",
        "train",
        "--recipe",
        "demo",
        "--data",
        phantoms,
        "--run",
        run,
        "--device",
        "cpu",
    ]
    return subprocess.run(
        ["sh", "-c", f'{limit}; exec "$@"', "sh", *words, *sets],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=run.parent,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("files", [5, 6, 7, 8])
def test_too_few_open_files_are_no_fault_of_the_data(
    files: int, tiny_values: dict, phantoms: Path, tmp_path: Path
) -> None:
    done = train_under(f"ulimit -n {files}", {**tiny_values, "training.epochs": 1}, phantoms, tmp_path / "run")
    assert done.returncode == 4, done.stderr
    said = done.stderr.splitlines()[-1]
    # With five not even the limit can be asked for
    limit = f"(: the limit is {files})" + "?" * (files == 5)
    assert re.match(f"fasttrain: too many files are open{limit}; raise it", said), done.stderr
    summary = tmp_path / "run/summary.json"
    assert not summary.exists() or json.loads(summary.read_text())["exit_code"] == 4


@pytest.mark.parametrize(
    ("limit", "code", "cure"),
    [
        ("true", 4, "install it anew"),
        ("ulimit -v 3000000", 5, "its memory is limited to 2.9 GiB (`ulimit -v`): raise that"),
    ],
)
def test_a_library_that_cannot_be_loaded(
    limit: str, code: int, cure: str, tiny_values: dict, phantoms: Path, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/torch.py").write_text("raise ImportError('libtorch_cpu.so: no such object', name='torch._C')\n")
    path = f"{tmp_path / 'first'}:{Path(lacking.__file__).parents[2]}"
    done = train_under(limit, tiny_values, phantoms, tmp_path / "run", PYTHONPATH=path)
    assert done.returncode == code, done.stderr
    assert "torch._C could not be loaded: libtorch_cpu.so: no such object" in done.stderr
    assert cure in done.stderr


def test_a_fault_of_the_data_stays_one(tiny) -> None:
    fault = DataError("a.nii.gz cannot be read: Permission denied")
    assert lacking.as_open_files(fault) is fault
    assert explained(fault, tiny().recipe, 0) is None
    few = DataError(["a.nii.gz cannot be read: Too many open files", "b.nii.gz cannot be read: Too many open files"])
    for found in (lacking.as_open_files(few), explained(few, tiny().recipe, 0)):
        assert isinstance(found, MachineError)
        assert len(found.faults) == 1


def test_memory_that_ran_out_in_a_run_is_not_told_as_too_little_to_begin() -> None:
    # Other tests of this process may have run something
    ON_FINISH._run_folder = ""
    assert lacking.told_of_memory().startswith("this machine has too little memory for fasttrain to begin")
    ON_FINISH.on_event(RunStarted("runs/x", "demo", "cpu", 1, 1, 1, 1))
    try:
        assert "ran out of memory; what the run has trained and saved lies in" in lacking.told_of_memory()
        assert "/runs/x" in lacking.told_of_memory()
    finally:
        ON_FINISH._run_folder = ""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a convolution"), False),
        (FasttrainError("could not create a primitive"), False),
    ],
)
def test_what_onednn_says_of_memory(error: Exception, is_memory: bool) -> None:
    assert ran_out_of_memory(error) == is_memory


def test_a_full_table_of_files_is_told_as_that_and_other_lost_folders_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert lacking.lacks_open_files(OSError(errno.EMFILE, "Too many open files", "x.py"))
    monkeypatch.setattr("fasttrain.machine.open_files.open_file_limit", lambda: 6)
    assert lacking.lacks_open_files(lost)
    assert not lacking.lacks_open_files(FileNotFoundError(errno.ENOENT, "No such file", "temporary directory"))
    for limit in (1024, None):
        monkeypatch.setattr("fasttrain.machine.open_files.open_file_limit", lambda limit=limit: limit)
        assert not lacking.lacks_open_files(lost)
