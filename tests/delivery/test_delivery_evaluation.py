"""The full evaluation: files, worst cases, mirrored answers, other folders."""

import csv
import json
import shlex
import shutil
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from small_machine import run_with

from fasttrain.cli.main import run as command_line
from fasttrain.delivery import evaluate, evaluate_in_full, mirrored, open_run
from fasttrain.engine.run import RunResult
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError


def silent(done: int, total: int, within: str = "") -> None: ...


def full(run, part: str, data: Path | None, folder: Path, **more):
    settings = {"tolerance_mm": 1.0, "surfaces": True, "worst": 2, **more}
    return evaluate_in_full(run, part, data, folder, silent, StopRequest(), **settings)


def test_every_case_and_class_is_measured_and_the_worst_are_drawn(
    whole_run: RunResult, phantoms: Path, tmp_path: Path
) -> None:
    found = full(open_run(whole_run.run, "cpu"), "validation", None, tmp_path)
    assert found.scores.summary.dice == whole_run.summary["best"]["value"]
    rows = list(csv.DictReader((tmp_path / "cases.csv").open()))
    assert len(rows) == 2 * 2
    for row in rows:
        label = nib.load(phantoms / f"labelsTr/{row['case']}.nii.gz")
        value = {"liver": 1, "kidney": 2}.get(row["class"]) or list(found.names).index(row["class"]) + 1
        voxel = abs(np.linalg.det(label.affine)) / 1000
        assert float(row["volume_ml"]) == pytest.approx((np.asarray(label.dataobj) == value).sum() * voxel, rel=1e-6)
        assert float(row["error_ml"]) == pytest.approx(float(row["predicted_ml"]) - float(row["volume_ml"]), abs=1e-9)
        assert 0 <= float(row["surface_dice"]) <= 1
        assert float(row["hd95_mm"]) > 0
    means = [one.dice for one in found.worst]
    assert means == sorted(means)
    assert [one.picture.exists() for one in found.worst if one.picture] == [True, True]
    interval = found.intervals["dice"][0]
    assert interval is not None
    assert interval.low <= found.scores.summary.dice <= interval.high


def test_former_pictures_go_once_there_are_new_ones_and_not_before(whole_run: RunResult, tmp_path: Path) -> None:
    former = [tmp_path / "epoch_0001_worst-3_gone.png", tmp_path / "folds_worst-1_gone.png"]
    for path in (*former, tmp_path / "mine.png"):
        path.write_bytes(b"a picture")
    stop = StopRequest()

    def interrupted(done: int, total: int, within: str = "") -> None:
        stop.ask("the test", 130)

    with pytest.raises(Stopped):
        evaluate_in_full(
            open_run(whole_run.run, "cpu"), "validation", None, tmp_path, interrupted, stop, 1.0, False, worst=1
        )
    assert all(path.exists() for path in former)
    drawn = full(open_run(whole_run.run, "cpu"), "validation", None, tmp_path, surfaces=False, worst=1).worst[0].picture
    assert drawn is not None
    assert {path.name for path in tmp_path.glob("*.png")} == {drawn.name, "mine.png"}


def test_without_surfaces_none_is_measured(whole_run: RunResult, tmp_path: Path) -> None:
    found = full(open_run(whole_run.run, "cpu"), "validation", None, tmp_path, surfaces=False, worst=0)
    assert {row["hd95_mm"] for row in found.rows()} == {row["surface_dice"] for row in found.rows()} == {None}
    assert found.worst == ()
    assert [path.name for path in tmp_path.iterdir()] == ["cases.csv"]


def test_mirrored_answers_are_others_and_leave_the_run_as_it_is(whole_run: RunResult) -> None:
    dices = [
        evaluate(mirrored(open_run(whole_run.run, "cpu"), axes), "validation", None, silent, StopRequest()).summary.dice
        for axes in ((), (0, 1, 2))
    ]
    assert dices[0] == whole_run.summary["best"]["value"]
    assert dices[1] != dices[0]
    with pytest.raises(RecipeError, match="--mirror 3 is no axis"):
        mirrored(open_run(whole_run.run, "cpu"), (0, 3))


def test_a_folder_of_another_layout_is_scored_case_by_case(
    whole_run: RunResult, phantoms: Path, tmp_path: Path
) -> None:
    """As nnU-Net has it: the run's own source makes phantoms, and would make them here."""
    data = tmp_path / "other"
    for part in ("imagesTr", "labelsTr"):
        (data / part).mkdir(parents=True)
    names = sorted(whole_run.summary["cases"])
    for name in names:
        shutil.copy(phantoms / f"imagesTr/{name}.nii.gz", data / f"imagesTr/new_{name}.nii.gz")
        shutil.copy(phantoms / f"labelsTr/{name}.nii.gz", data / f"labelsTr/new_{name}.nii.gz")
    (data / "dataset.json").write_text(
        json.dumps(
            {
                "modality": {"0": "CT"},
                "labels": {"0": "background", "1": "a", "2": "b"},
                "training": [
                    {"image": f"./imagesTr/new_{name}.nii.gz", "label": f"./labelsTr/new_{name}.nii.gz"}
                    for name in names
                ],
            }
        )
    )
    run = open_run(whole_run.run, "cpu")
    source = {"kind": "folders", "images": "imagesTr", "labels": "labelsXX"}
    from fasttrain.recipe.data_spec import FoldersSource

    recipe = run.recipe.model_copy(
        update={"data": run.recipe.data.model_copy(update={"source": FoldersSource(**source)})}
    )
    object.__setattr__(run, "recipe", recipe)
    told: list[str] = []
    found = evaluate_in_full(
        run, "all", data, tmp_path / "out", silent, StopRequest(), 1.0, False, 1, None, told.append
    )
    assert found.scores.summary.dice == whole_run.summary["best"]["value"]
    assert any("is read as decathlon" in one for one in told)
    with pytest.raises(DataError):
        evaluate(run, "all", tmp_path / "nothing", silent, StopRequest())


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_scored(
    whole_run: RunResult, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--out"):
        full(open_run(whole_run.run, "cpu"), "validation", None, tmp_path / "file/out")


def test_a_full_disk_is_told_before_anything_is_scored(whole_run: RunResult, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["evaluate", str(whole_run.run), "--device", "cpu", "--out", str(disk / "out")]
    done = run_with(
        f"import os, sys; from fasttrain.cli.main import run\nsys.argv[1:] = {words!r}\n"
        f"try: run()\nfinally: print(os.listdir({str(disk / 'out')!r}))",
        before=f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(disk))} &&",
        namespace=True,
    )
    assert (done.returncode, done.stdout) == (6, "[]\n")
    assert done.stderr.splitlines()[-1].startswith(
        f"fasttrain: {disk / 'out'} cannot be written: No space left on device ("
    )


def test_the_command_writes_what_it_prints(
    whole_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fasttrain", "evaluate", str(whole_run.run), *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line()
        return int(ended.value.code or 0)

    assert called("--device", "cpu", "--out", str(tmp_path), "--json", "--mirror", "none", "--worst", "1") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "evaluation.json").read_text())
    assert document["dice"] == whole_run.summary["best"]["value"]
    assert document["intervals"]["dice"]["mean"][0] <= document["dice"] <= document["intervals"]["dice"]["mean"][1]
    assert Path(document["worst"][0]["picture"]).exists()
    assert called("--mirror", "x") == 2
    assert called("--tolerance", "0") == 2
    assert called("--worst=-1") == 2
