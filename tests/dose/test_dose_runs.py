"""A dose is trained, judged, resumed, drawn, scored again and predicted, from made patients."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from dose_patients import INDEX, PLACE, write_patient

from fasttrain import train
from fasttrain.cli.main import run as command
from fasttrain.data.caches import open_case_source
from fasttrain.data.openkbp import csv_case, read_patient
from fasttrain.data.preprocess import Preprocess
from fasttrain.delivery import open_run, predict
from fasttrain.delivery.predictions import Predictions
from fasttrain.engine.build import build_predictor
from fasttrain.engine.limits import Limits
from fasttrain.engine.optimisation.patience import out_of_patience
from fasttrain.engine.planning.trial import Candidate
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.state import Progress
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.validation import Validator
from fasttrain.errors import EXIT_TERMINATED, StorageError
from fasttrain.machine.hardware import survey
from fasttrain.recipe.training_spec import EarlyStoppingSpec
from fasttrain.telemetry.events import EpochEnded, Event
from fasttrain.telemetry.metrics_csv import read_metrics


@pytest.fixture(scope="module")
def whole(small, patients: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(small(), data=patients, run=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


def test_the_files_of_a_run(whole: RunResult) -> None:
    rows = read_metrics(whole.run / "metrics.csv")
    assert whole.exit_code == 0
    scores = [row["val_dose_score"] for row in rows]
    best = whole.summary["best"]
    assert (best["metric"], best["value"]) == ("val_dose_score", min(scores))
    assert rows[best["epoch"] - 1]["val_dose_score"] == min(scores)
    assert rows[-1]["val_dvh_PTV70"] > 0
    assert rows[-1]["val_dvh_Larynx"] is None, "no patient has one"
    (case,) = whole.summary["cases"].values()
    assert case["dose_score"] == scores[-1]
    drawn = {path.name for folder in ("plots", "pictures") for path in (whole.run / folder).iterdir()}
    assert drawn == {"loss.png", "dose.png", "epoch_0002_only_pt_201.png"}


class StopAfterAnEpoch:
    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def on_event(self, event: Event) -> None:
        if isinstance(event, EpochEnded):
            self.stop.ask("the test", EXIT_TERMINATED)

    def close(self) -> None:
        pass


def test_a_dose_score_ends_a_run_when_it_is_down_to_the_limit(
    small, patients: Path, whole: RunResult, tmp_path: Path
) -> None:
    scores = [row["val_dose_score"] for row in read_metrics(whole.run / "metrics.csv")]
    reached, beyond = scores[0] * 1.0001, min(scores) * 0.9
    ended = train(small(), data=patients, run=tmp_path / "a", device="cpu", limits=Limits(until_dice=reached))
    assert (ended.exit_code, ended.summary["epochs"]) == (0, 1)
    assert ended.summary["stopped_by"] == f"--until-dice {reached:g}"
    again = resume(tmp_path / "a", data=patients, device="cpu", limits=Limits(until_dice=beyond), asked_for=False)
    assert (again.summary["epochs"], again.summary["stopped_by"]) == (2, None)


def test_a_dose_whose_money_is_spent_is_told_by_its_own_figure(small, patients: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    train(small(), data=patients, run=tmp_path / "cut", device="cpu", stop=stop, observers=[StopAfterAnEpoch(stop)])
    spent = resume(tmp_path / "cut", data=patients, limits=Limits(max_cost=1e-9, price_per_hour=1.0))
    best, (row,) = spent.summary["best"], read_metrics(tmp_path / "cut" / "metrics.csv")
    assert (best["metric"], best["value"]) == ("val_dose_score", row["val_dose_score"])


def test_a_dose_goes_on_with_another_batch_size(small, patients: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    train(small(), data=patients, run=tmp_path / "cut", device="cpu", stop=stop, observers=[StopAfterAnEpoch(stop)])
    done = resume(tmp_path / "cut", data=patients, device="cpu", assignments=["training.batch_size=4"])
    assert (done.exit_code, done.summary["epochs"]) == (0, 2)


def test_a_resumed_run_is_the_unbroken_one(small, patients: Path, whole: RunResult, tmp_path: Path) -> None:
    stop = StopRequest()
    half = train(
        small(), data=patients, run=tmp_path / "cut", device="cpu", stop=stop, observers=[StopAfterAnEpoch(stop)]
    )
    assert half.summary["epochs"] == 1
    resume(tmp_path / "cut", data=patients, device="cpu")
    names = ("train_loss", "val_dose_score", "val_dvh_score")
    rows, wanted = (
        [[row[name] for name in names] for row in read_metrics(run / "metrics.csv")]
        for run in (tmp_path / "cut", whole.run)
    )
    assert rows == wanted


def test_a_lower_score_is_the_better_one(small) -> None:
    task, progress = small().recipe.task_facts, Progress()
    spec = EarlyStoppingSpec(patience=2)
    told = [out_of_patience(spec, progress, task.rising(score)) for score in (5.0, 4.0, 3.0, 3.5, 3.2)]
    assert told == [False, False, False, False, True]


def test_a_wrong_prediction_outside_the_mask_changes_no_score(small, patients: Path) -> None:
    recipe = small().recipe
    predictor = build_predictor(recipe, Candidate("off", False), survey("cpu"))
    cases = (csv_case(patients / "validation-pats" / "pt_201"),)
    source = open_case_source("memory", cases, Preprocess(recipe, training=False), 1)
    patient = read_patient(cases[0], recipe.data.class_names)
    possible = torch.from_numpy((patient.structures >> 10) & 1 == 1)

    def scored(change) -> float:
        plain = type(predictor).dose_maps
        predictor.dose_maps = lambda *given: ((index, change(dose)) for index, dose in plain(predictor, *given))
        validator = Validator(predictor, source, cases, recipe, keep_labels=True)
        scores = validator.run(StopRequest(), lambda done, total: None)
        return scores.summary.dose_score, scores.summary.dvh_score

    as_it_is = scored(lambda dose: dose)
    assert scored(lambda dose: torch.where(possible, dose, 1e4)) == as_it_is
    assert scored(lambda dose: torch.where(possible, dose + 1, dose)) != as_it_is
    assert scored(lambda dose: torch.from_numpy(patient.dose)) == (0.0, 0.0)


def test_a_prediction_that_ended_between_its_two_files_goes_on(
    whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_patient(tmp_path / "given" / "pt_301", 7, dose=False)
    trained, replace = open_run(whole.run, "cpu"), os.replace

    def full(source: Path, target: Path) -> None:
        if str(target).endswith(".nii.gz"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    def predicted() -> Predictions:
        return predict(trained, tmp_path / "given", tmp_path / "out", lambda done, total: None, StopRequest())

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError):
        predicted()
    monkeypatch.undo()
    assert (tmp_path / "out" / "pt_301.csv").exists()
    assert [path.name for path in predicted().written] == ["pt_301.csv", "pt_301.nii.gz"]
    assert len(predicted().skipped) == 2


def test_predictions_of_a_patient_without_a_dose(whole: RunResult, tmp_path: Path) -> None:
    write_patient(tmp_path / "given" / "pt_301", 7, dose=False)
    trained = open_run(whole.run, "cpu")
    done = predict(trained, tmp_path / "given", tmp_path / "out", lambda done, total: None, StopRequest())
    assert [path.name for path in done.written] == ["pt_301.csv", "pt_301.nii.gz"]
    with open(tmp_path / "out" / "pt_301.csv", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["", "data"]
    doses = {int(index): float(value) for index, value in rows}
    volume = nib.load(tmp_path / "out" / "pt_301.nii.gz")
    values = np.asarray(volume.dataobj)
    assert values.shape == (128, 128, 128)
    assert nib.aff2axcodes(volume.affine) == ("P", "L", "I")
    assert np.allclose(nib.affines.voxel_sizes(volume.affine), [4, 4, 2.5])
    assert doses[INDEX] == pytest.approx(float(values[PLACE]))
    assert doses[INDEX] > 0
    patient = read_patient(csv_case(tmp_path / "given" / "pt_301"), ())
    outside = np.flatnonzero(patient.structures.reshape(-1) & 1 == 0)
    assert not set(doses) & set(outside.tolist())
    assert min(doses.values()) >= 0
    # The challenge's file reads back as a dose
    shutil.copy(tmp_path / "out" / "pt_301.csv", tmp_path / "given" / "pt_301" / "dose.csv")
    back = read_patient(csv_case(tmp_path / "given" / "pt_301"), ())
    assert np.array_equal(back.dose, values)


def test_scores_by_command_agree_with_the_run(whole: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["evaluate", str(whole.run), "--device", "cpu", "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dose_score_gy"] == pytest.approx(whole.summary["best"]["value"], rel=1e-6)
    assert set(document["cases"]["pt_201"]["metrics_gy"]["PTV70"]) == {"D99", "D95", "D1"}


def test_mirrored_answers_know_left_from_right(small, patients: Path) -> None:
    """A network that answers where the left parotid lies to the left and the right one to the right: in mirrored windows too."""
    recipe = small(validation__mirror=[1]).recipe
    predictor = build_predictor(recipe, Candidate("off", False), survey("cpu"))
    left, right = (1 + recipe.data.class_names.index(name) for name in ("LeftParotid", "RightParotid"))

    def forward(windows: torch.Tensor) -> torch.Tensor:
        half = windows.shape[3] // 2
        sides = [windows[:, right : right + 1, :, :half], windows[:, left : left + 1, :, half:]]
        return torch.cat(sides, dim=3) * 4 - 2

    predictor.forward = forward
    preprocess = Preprocess(recipe, training=False)
    sample = preprocess.as_sample(preprocess(csv_case(patients / "validation-pats" / "pt_201")))
    dose = predictor.dose_map(sample, False)
    inside = (sample.label[0] >> (left - 1)) & 1 | (sample.label[0] >> (right - 1)) & 1
    assert torch.allclose(dose, 140.0 * inside, atol=1e-3)
    assert inside.any()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"possible_dose_mask.csv": ",data\n"}, "patient pt_1 has no voxel in its possible dose mask"),
        ({"dose.csv": ",data\n"}, "patient pt_1 has no dose above 0"),
        ({"dose.csv": ",data\n5,-2\n"}, "patient pt_1 has a dose of -2 Gy"),
        ({"ct.csv": ",data\n"}, "is constant: every voxel of channel CT is 0"),
        ({"ct.csv": ",data\n7,1\n7,2\n", "PTV70.csv": ""}, "row 3 has the index 7, which an earlier row has too"),
        ({"voxel_dimensions.csv": "1\n2\n"}, "3 positive numbers, one a row, are expected"),
        ({"dose.csv": None}, "patient pt_1 lacks dose.csv"),
    ],
)
def test_faulty_patients_are_refused_before_training(
    small, patients: Path, tmp_path: Path, damage: dict[str, str | None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "set"
    shutil.copytree(patients, root)
    for name, body in damage.items():
        path = root / "train-pats" / "pt_1" / name
        path.unlink() if body is None else path.write_text(body)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(small().as_yaml())
    with pytest.raises(SystemExit) as ended:
        command(["check", "--recipe", str(recipe), "--data", str(root)])
    assert ended.value.code == 3
    output = "".join(capsys.readouterr())
    assert told in output
