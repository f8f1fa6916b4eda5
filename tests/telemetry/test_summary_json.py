"""summary.json: always the same keys, nulls for what is unknown, written whole."""

import json
from pathlib import Path

import pytest

from fasttrain.errors import StorageError
from fasttrain.telemetry.summary import write_summary


def test_fields_are_as_documented_and_further_ones_follow(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(
        path,
        status="stopped",
        stopped_by="time limit",
        exit_code=0,
        best={"metric": "dice", "value": 0.88, "epoch": 7},
        seconds={"total": 60.0, "to_first_step": 4.0, "start": {"import": 4.0}, "training": 50.0, "validation": 6.0},
        run=Path("runs/x"),
        ranks=(0, 1),
    )
    assert json.loads(path.read_text()) == {
        "status": "stopped",
        "stopped_by": "time limit",
        "best": {"metric": "dice", "value": 0.88, "epoch": 7},
        "seconds": {"total": 60.0, "to_first_step": 4.0, "start": {"import": 4.0}, "training": 50.0, "validation": 6.0},
        "exit_code": 0,
        "run": "runs/x",
        "ranks": [0, 1],
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_what_is_unknown_or_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, status="failed", stopped_by=None, exit_code=7, best={"value": float("nan")}, loss=float("inf"))
    assert "NaN" not in path.read_text()
    summary = json.loads(path.read_text())
    assert summary["best"] == {"metric": None, "value": None, "epoch": None}
    assert summary["seconds"] == dict.fromkeys(("total", "to_first_step", "start", "training", "validation"))
    assert summary["loss"] is None


def test_a_key_that_the_format_lacks_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, status="done", stopped_by=None, exit_code=0)
    before = path.read_text()
    with pytest.raises(TypeError, match="best has score"):
        write_summary(path, status="done", stopped_by=None, exit_code=0, best={"score": 1.0})
    with pytest.raises(TypeError, match="no JSON form"):
        write_summary(path, status="done", stopped_by=None, exit_code=0, extra=object())
    assert path.read_text() == before


def test_a_folder_that_is_missing_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write_summary(tmp_path / "none" / "summary.json", status="done", stopped_by=None, exit_code=0)
