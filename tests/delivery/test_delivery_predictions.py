"""Predictions that are done are skipped, faulty cases are told, and windows fit the memory that is free."""

import errno
import os
import shutil
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain.cli.main import run as command_line
from fasttrain.data.sources.unlabelled import find_unlabelled
from fasttrain.delivery import mirrored, open_run, predict
from fasttrain.delivery.done_before import RECORD
from fasttrain.delivery.window_memory import fit_windows, windows_that_fit, with_fewer_windows
from fasttrain.engine.run import RunResult
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe.data_spec import FoldersSource


def silent(done: int, total: int, within: str = "") -> None: ...


@pytest.fixture
def given(phantoms: Path, tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for path in sorted((phantoms / "imagesTr").iterdir())[:3]:
        shutil.copy(path, tmp_path / "in")
    return tmp_path / "in"


def test_only_what_is_done_and_unchanged_is_skipped(whole_run: RunResult, given: Path, tmp_path: Path) -> None:
    run, out = open_run(whole_run.run, "cpu"), tmp_path / "out"
    first = predict(run, given, out, silent, StopRequest())
    assert (len(first.written), first.skipped) == (3, ())
    again = predict(run, given, out, silent, StopRequest())
    assert (again.written, again.skipped) == ((), first.written)
    # One lacks: it alone is made
    first.written[1].unlink()
    third = predict(run, given, out, silent, StopRequest())
    assert third.written == first.written[1:2]
    # Somebody drew in it
    first.written[0].write_bytes(first.written[0].read_bytes() + b"\0")
    with pytest.raises(RecipeError, match=r"1 of 3 predictions are there already.*changed since"):
        predict(run, given, out, silent, StopRequest())
    assert len(predict(run, given, out, silent, StopRequest(), overwrite=True).written) == 3
    # Another input of the same name
    os.utime(sorted(given.iterdir())[2], ns=(1, 1))
    with pytest.raises(RecipeError, match="not made of these inputs"):
        predict(run, given, out, silent, StopRequest())
    assert len(predict(run, given, out, silent, StopRequest(), overwrite=True).written) == 3
    # Other answers
    with pytest.raises(RecipeError, match="3 of 3"):
        predict(mirrored(run, (0,)), given, out, silent, StopRequest())


def test_a_torn_record_makes_nothing_done(whole_run: RunResult, given: Path, tmp_path: Path) -> None:
    run, out = open_run(whole_run.run, "cpu"), tmp_path / "out"
    predict(run, given, out, silent, StopRequest())
    lines = (out / RECORD).read_text().splitlines()
    (out / RECORD).write_text("\n".join([*lines[:2], lines[2][:40], "[1]", "null"]))
    with pytest.raises(RecipeError, match="1 of 3"):
        predict(run, given, out, silent, StopRequest())


def test_what_follows_a_torn_record_is_done(whole_run: RunResult, given: Path, tmp_path: Path) -> None:
    run, out = open_run(whole_run.run, "cpu"), tmp_path / "out"
    written = predict(run, given, out, silent, StopRequest()).written
    lines = (out / RECORD).read_text().splitlines()
    (out / RECORD).write_text("\n".join([*lines[:2], lines[2][:40]]))
    written[2].unlink()
    assert predict(run, given, out, silent, StopRequest()).written == written[2:]
    assert predict(run, given, out, silent, StopRequest()).skipped == written


@pytest.mark.parametrize("after", [False, True])
def test_a_predictions_file_is_never_there_without_its_record(
    whole_run: RunResult, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """It ends as the second one gets its name, or a moment later."""
    run, out, replace, ended = open_run(whole_run.run, "cpu"), tmp_path / "out", os.replace, []

    def end(source: Path, target: Path) -> None:
        if after:
            replace(source, target)
        ended.append(target)
        if len(ended) == 2:
            raise OSError(errno.EIO, "Input/output error")
        if not after:
            replace(source, target)

    monkeypatch.setattr(os, "replace", end)
    with pytest.raises(StorageError):
        predict(run, given, out, silent, StopRequest())
    monkeypatch.undo()
    assert len(list(out.glob("*.nii.gz"))) == 1 + after
    again = predict(run, given, out, silent, StopRequest())
    assert (len(again.written), len(again.skipped)) == (2 - after, 1 + after)


def test_what_was_to_be_overwritten_and_was_not_is_still_done(
    whole_run: RunResult, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the line of the new one is written, and before that has the name."""
    run, out = open_run(whole_run.run, "cpu"), tmp_path / "out"
    written = predict(run, given, out, silent, StopRequest()).written

    def end(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", end)
        with pytest.raises(StorageError):
            predict(run, given, out, silent, StopRequest(), overwrite=True)
    assert predict(run, given, out, silent, StopRequest()).skipped == written


def test_what_a_killed_prediction_left_is_removed(whole_run: RunResult, given: Path, tmp_path: Path) -> None:
    name = sorted(given.iterdir())[0].name
    (tmp_path / "out").mkdir()
    for left in (f".{name}.1.part", ".mine.nii.gz.1.part"):
        (tmp_path / "out" / left).write_text("half")
    predict(open_run(whole_run.run, "cpu"), given, tmp_path / "out", silent, StopRequest())
    assert [path.name for path in (tmp_path / "out").glob("*.part")] == [".mine.nii.gz.1.part"]


def test_a_case_that_lacks_a_channel_is_told_and_the_rest_is_found(whole_run: RunResult, tmp_path: Path) -> None:
    data = open_run(whole_run.run, "cpu").recipe.data
    data = data.model_copy(
        update={"source": FoldersSource(kind="folders", image_suffixes=("_a", "_b")), "channels": ("a", "b")}
    )
    for name in ("one_a", "one_b", "two_a"):
        nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
    faults: list[str] = []
    assert [case.name for case in find_unlabelled(data, tmp_path, None, faults)] == ["one"]
    assert faults == ["case two lacks the image file of channel b"]
    with pytest.raises(DataError, match="case two lacks"):
        find_unlabelled(data, tmp_path)
    (tmp_path / "one_b.nii.gz").unlink()
    with pytest.raises(DataError, match="case one lacks"):
        find_unlabelled(data, tmp_path, None, [])


def test_the_command_ends_with_3_where_a_volume_cannot_be_taken(
    whole_run: RunResult,
    given: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nib.save(nib.Nifti1Image(np.ones((20, 20, 20, 3), np.float32), np.eye(4)), given / "three.nii.gz")
    nib.save(nib.Nifti1Image(np.ones((20, 20), np.float32), np.eye(4)), given / "plane.nii.gz")

    def called(run: Path) -> int:
        arguments = ["predict", str(run), str(given), str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["fasttrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line()
        return int(ended.value.code or 0)

    assert called(whole_run.run) == 3
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3
    faults = [line for line in told.err.splitlines() if line.startswith("fasttrain: ")]
    assert ["plane.nii.gz" in faults[0], "three.nii.gz" in faults[1]] == [True, True]
    assert called(whole_run.run) == 3
    assert "3 predictions skipped, since they are done and unchanged" in capsys.readouterr().err
    shutil.copytree(whole_run.run, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare/checkpoints")
    assert called(tmp_path / "bare") == 6


def test_windows_fit_what_is_free(whole_run: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert windows_that_fit(4, 100, 2000, 1) == 4
    assert windows_that_fit(4, 100, 2000, 4) == 10
    assert windows_that_fit(4, 100, 500, 4) == 2
    assert windows_that_fit(4, 100, 10, 4) == 1
    run, told = open_run(whole_run.run, "cpu"), list[str]()
    fit_windows(run, told.append)
    assert (run.predictor.recipe.validation.window.batch_size, told) == (4, [])
    monkeypatch.setattr("fasttrain.delivery.window_memory.memory_free_bytes", lambda: 1 << 20)
    fit_windows(run, told.append)
    assert run.predictor.recipe.validation.window.batch_size < 4
    assert "at a time instead of 4" in told[0]


def test_memory_that_runs_out_halves_the_windows(whole_run: RunResult) -> None:
    run, told = open_run(whole_run.run, "cpu"), list[str]()

    def answer() -> int:
        batch_size = run.predictor.recipe.validation.window.batch_size
        if batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size

    assert with_fewer_windows(run, answer, told.append) == 1
    assert len(told) == 2

    def never() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        with_fewer_windows(run, never, told.append)


def test_a_spacing_beyond_all_memory_costs_only_its_own_case(whole_run: RunResult, given: Path, tmp_path: Path) -> None:
    first, second = sorted(given.iterdir())[:2]
    image = nib.load(first)
    values, affine = np.asarray(image.dataobj, dtype=np.float32), image.affine.copy()
    nib.save(nib.Nifti1Image(values[:8, :8, :8], affine @ np.diag([1e5, 1e5, 1e5, 1.0])), first)
    found = predict(open_run(whole_run.run, "cpu"), given, tmp_path / "out", silent, StopRequest())
    (fault,) = found.faults
    assert str(first) in fault
    assert "mend the spacing in its header" in fault
    assert second.name in {path.name for path in found.written}
    # The same voxels with a sound spacing are taken
    nib.save(nib.Nifti1Image(values[:8, :8, :8], affine), first)
    assert not predict(open_run(whole_run.run, "cpu"), given, tmp_path / "out", silent, StopRequest()).faults
