"""Evaluation and prediction of a trained run: the run's own numbers, on the files' own grids."""

import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain.data.sources.unlabelled import find_unlabelled
from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.run import RunResult, train
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe.data_spec import DataSpec


def silent(done: int, total: int) -> None: ...


def dice_by_hand(prediction: np.ndarray, label: np.ndarray, values: list[int]) -> list[float]:
    return [
        2 * ((prediction == v) & (label == v)).sum() / ((prediction == v).sum() + (label == v).sum())
        for v in values
        if ((prediction == v) | (label == v)).any()
    ]


def test_evaluate_gives_the_runs_own_score(whole_run: RunResult) -> None:
    trained = open_run(whole_run.run, "cpu")
    scores = evaluate(trained, "validation", None, silent, StopRequest())
    assert scores.summary.dice == whole_run.summary["best"]["value"]
    assert trained.epoch == whole_run.summary["best"]["epoch"]


def test_predictions_lie_on_the_inputs_grid_and_score_as_the_run(
    whole_run: RunResult, phantoms: Path, tmp_path: Path
) -> None:
    names = sorted(whole_run.summary["cases"])
    (tmp_path / "in").mkdir()
    for name in names:
        shutil.copy(phantoms / f"imagesTr/{name}.nii.gz", tmp_path / "in")
    done = predict(open_run(whole_run.run, "cpu"), tmp_path / "in", tmp_path / "out", silent, StopRequest())
    assert done.faults == ()
    assert [path.name for path in done.written] == [f"{name}.nii.gz" for name in names]
    by_class: dict[int, list[float]] = {1: [], 2: []}
    for path in done.written:
        given, made = nib.load(tmp_path / "in" / path.name), nib.load(path)
        assert made.shape == given.shape
        assert np.array_equal(made.affine, given.affine)
        values = np.asarray(made.dataobj)
        assert set(np.unique(values)) <= {0, 1, 2}
        label = np.asarray(nib.load(phantoms / "labelsTr" / path.name).dataobj)
        for value, scores in by_class.items():
            scores.extend(dice_by_hand(values, label, [value]))
    mean = np.mean([np.mean(scores) for scores in by_class.values()])
    assert mean == pytest.approx(whole_run.summary["best"]["value"], abs=1e-9)


def test_declared_values_come_back(tiny, phantoms: Path, tmp_path: Path) -> None:
    """Labels 1 and 4 are trained as classes 1 and 2 and written as 1 and 4 again."""
    data = tmp_path / "data"
    for part in ("images", "labels"):
        shutil.copytree(phantoms / f"{part}Tr", data / part)
    for path in (data / "labels").iterdir():
        image = nib.load(path)
        values = np.asarray(image.dataobj).copy()
        values[values == 2] = 4
        nib.save(nib.Nifti1Image(values.astype(np.uint8), image.affine), path)
    recipe = tiny(data__source={"kind": "folders"}, data__classes={1: "liver", 4: "kidney"}, training__epochs=1)
    result = train(recipe, data=data, run=tmp_path / "run", device="cpu")
    image = sorted((data / "images").iterdir())[0]
    done = predict(open_run(result.run, "cpu"), image, tmp_path / "one.nii.gz", silent, StopRequest())
    assert done.written == (tmp_path / "one.nii.gz",)
    assert set(np.unique(np.asarray(nib.load(done.written[0]).dataobj))) <= {0, 1, 4}


def test_a_bad_file_is_told_and_the_rest_is_done(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    good = sorted((phantoms / "imagesTr").iterdir())[0]
    (tmp_path / "in").mkdir()
    shutil.copy(good, tmp_path / "in/good.nii.gz")
    (tmp_path / "in/bad.nii.gz").write_bytes(good.read_bytes()[:500])
    done = predict(open_run(whole_run.run, "cpu"), tmp_path / "in", tmp_path / "out", silent, StopRequest())
    assert [path.name for path in done.written] == ["good.nii.gz"]
    assert len(done.faults) == 1
    assert "bad.nii.gz" in done.faults[0]


def test_an_input_is_never_overwritten(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    good = sorted((phantoms / "imagesTr").iterdir())[0]
    shutil.copy(good, tmp_path / "case.nii.gz")
    done = predict(open_run(whole_run.run, "cpu"), tmp_path, tmp_path, silent, StopRequest())
    assert done.written == ()
    assert "overwrite" in done.faults[0]
    assert (tmp_path / "case.nii.gz").read_bytes() == good.read_bytes()


def test_what_cannot_be_predicted_is_one_sentence(whole_run: RunResult, tmp_path: Path) -> None:
    trained = open_run(whole_run.run, "cpu")
    with pytest.raises(DataError, match="does not exist"):
        predict(trained, tmp_path / "nothing", tmp_path / "out", silent, StopRequest())
    with pytest.raises(DataError, match="no volume"):
        predict(trained, tmp_path, tmp_path / "out", silent, StopRequest())
    with pytest.raises(RecipeError, match="holds no run"):
        open_run(tmp_path, "cpu")
    with pytest.raises(RecipeError, match="no test cases"):
        evaluate(trained, "test", None, silent, StopRequest())


def test_an_unwritable_target_is_told(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        predict(open_run(whole_run.run, "cpu"), phantoms / "imagesTr", tmp_path / "file/out", silent, StopRequest())


def test_a_stop_is_heard_between_cases(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    stop.ask("a test", 130)
    with pytest.raises(Stopped):
        predict(open_run(whole_run.run, "cpu"), phantoms / "imagesTr", tmp_path / "out", silent, stop)


def spec(source: dict, channels: list[str]) -> DataSpec:
    return DataSpec.model_validate(
        {
            "source": source,
            "channels": channels,
            "classes": {1: "a"},
            "split": {"kind": "last", "validation": 1},
            "intensity": {"kind": "none"},
        }
    )


def test_files_of_one_case_are_found_by_their_channel(tmp_path: Path) -> None:
    for name in ("a_0000", "a_0001", "b_0000", "b_0001"):
        (tmp_path / f"{name}.nii.gz").touch()
    nnunet = spec({"kind": "nnunet"}, ["flair", "t1"])
    cases = find_unlabelled(nnunet, tmp_path)
    assert [case.name for case in cases] == ["a", "b"]
    assert [path.name for path in cases[0].images] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert [case.name for case in find_unlabelled(nnunet, tmp_path / "b_0001.nii.gz")] == ["b"]
    (tmp_path / "b_0001.nii.gz").unlink()
    with pytest.raises(DataError, match="case b lacks .* t1"):
        find_unlabelled(nnunet, tmp_path)


def test_evaluate_tells_the_faults_of_all_cases_at_once(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    shutil.copytree(phantoms, tmp_path / "data")
    names = sorted(whole_run.summary["cases"])
    for name in names:
        path = tmp_path / f"data/imagesTr/{name}.nii.gz"
        path.write_bytes(path.read_bytes()[:5000])
    # A case that is not scored may be what it likes
    (tmp_path / "data/imagesTr/phantom_000.nii.gz").write_bytes(b"")
    trained, plain = open_run(whole_run.run, "cpu"), {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}
    trained = _with_data(trained, source=plain)
    with pytest.raises(DataError) as refused:
        evaluate(trained, "validation", tmp_path / "data", silent, StopRequest())
    assert [name for name in names for fault in refused.value.faults if name in fault] == names
    assert len(refused.value.faults) == 2


def test_evaluate_leaves_out_what_training_would(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    shutil.copytree(phantoms, tmp_path / "data")
    first, second = sorted(whole_run.summary["cases"])
    (tmp_path / f"data/labelsTr/{first}.nii.gz").unlink()
    plain = {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}
    trained = _with_data(open_run(whole_run.run, "cpu"), source=plain, bad_cases="skip")
    warned: list[str] = []
    scores = evaluate(trained, "validation", tmp_path / "data", silent, StopRequest(), warn=warned.append)
    assert [one.name for one in scores.cases] == [second]
    assert warned[0] == f"left out 1 faulty case (data.bad_cases: skip): {first}"
    (tmp_path / f"data/labelsTr/{second}.nii.gz").unlink()
    with pytest.raises(DataError, match="has no label"):
        evaluate(trained, "validation", tmp_path / "data", silent, StopRequest())


def _with_data(trained: TrainedRun, **changes: object) -> TrainedRun:
    data = DataSpec.model_validate({**trained.recipe.data.model_dump(), **changes})
    return replace(trained, recipe=trained.recipe.model_copy(update={"data": data}))
