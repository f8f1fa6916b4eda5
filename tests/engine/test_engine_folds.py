"""All folds of a split: each an ordinary run, scores pooled, resumed where they were cut short, and one ensemble of them."""

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain import train, train_folds
from fasttrain.cli.main import run as command
from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.engine.folds import resume_folds
from fasttrain.engine.limits import Limits, folds_gone, is_over
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import newest_unfinished
from fasttrain.telemetry.events import Event, Message, RunEnded, StepLogged

SPLIT = {"kind": "kfold", "folds": 3}


@pytest.fixture(scope="module")
def recipe(tiny):
    return tiny(data__split=SPLIT, training__epochs=2)


@pytest.fixture(scope="module")
def folds(recipe, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train_folds(recipe, data=phantoms, run=tmp_path_factory.mktemp("folds") / "all", device="cpu")


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "StepLogged"]


def test_every_case_is_scored_once_by_the_network_that_never_saw_it(folds: RunResult, phantoms: Path) -> None:
    summary = folds.summary
    assert (folds.exit_code, summary["status"], summary["stopped_by"]) == (0, "done", None)
    names = {path.name.removesuffix(".nii.gz") for path in (phantoms / "imagesTr").iterdir()}
    assert set(summary["cases"]) == names
    pooled: dict[str, dict[str, float]] = {}
    for number, fold in enumerate(summary["folds"]):
        own = json.loads((folds.run / f"fold_{number}/summary.json").read_text())
        assert fold == {"run": f"fold_{number}", "status": "done", "best": own["best"]}
        plan = json.loads((folds.run / f"fold_{number}/plan.json").read_text())
        assert set(own["cases"]) == set(plan["cases"]["validation"])
        assert not set(own["cases"]) & set(plan["cases"]["training"])
        for name, dices in own["cases"].items():
            assert summary["cases"][name] == dices
            pooled[name] = dices
    classes = ("liver", "kidney")
    means = [np.mean([dices[name] for dices in pooled.values() if dices[name] is not None]) for name in classes]
    assert summary["best"]["value"] == pytest.approx(float(np.mean(means)))
    assert summary["steps"] == 30


def test_a_fold_is_the_run_it_would_be_alone(folds: RunResult, tiny, phantoms: Path, tmp_path: Path) -> None:
    alone = tiny(data__split={**SPLIT, "fold": 1}, training__epochs=2)
    result = train(alone, data=phantoms, run=tmp_path / "alone", device="cpu")
    assert losses(result.run) == losses(folds.run / "fold_1")
    assert "# --fold all" in (folds.run / "fold_1/recipe.yaml").read_text()


class Ends:
    """Keeps how the end of a run says that it can be gone on with."""

    def __init__(self) -> None:
        self.commands: list[str | None] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.commands.append(event.resume_command)

    def close(self) -> None: ...


class Warnings:
    """Keeps what a run warns of."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message) and event.level == "warning":
            self.told.append(event.text)

    def close(self) -> None: ...


class StopAt:
    def __init__(self, stop: StopRequest, step: int) -> None:
        self.stop, self.step = stop, step

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == self.step:
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


def test_folds_cut_short_go_on_as_if_unbroken(recipe, folds: RunResult, phantoms: Path, tmp_path: Path) -> None:
    stop, run = StopRequest(), tmp_path / "runs/all"

    ended = Ends()

    def watch(fold: int, count: int) -> list:
        assert count == 3
        return [StopAt(stop, 7), ended] if fold == 1 else []

    cut = train_folds(recipe, data=phantoms, run=run, device="cpu", watch=watch, stop=stop)
    assert (cut.exit_code, cut.summary["status"], cut.summary["stopped_by"]) == (143, "stopped", "a test")
    assert not (run / "fold_2").exists()
    # Not the fold's own: that would leave the others untrained
    assert ended.commands == [f"fasttrain resume {run}"]
    assert newest_unfinished(tmp_path / "runs")[0] == run
    with pytest.raises(
        RecipeError, match="1 of 3 folds are not trained yet, fold_2 the first; go on with `fasttrain resume"
    ):
        open_run(run, "cpu")
    whole = resume_folds(run)
    assert whole.exit_code == 0
    assert whole.summary["cases"] == folds.summary["cases"]
    for fold in range(3):
        assert losses(run / f"fold_{fold}") == losses(folds.run / f"fold_{fold}")
    assert newest_unfinished(tmp_path / "runs")[0] is None
    assert resume_folds(run).summary == whole.summary


def test_a_finished_whole_that_lost_a_fold_trains_that_anew(folds: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "all"
    shutil.copytree(folds.run, run)
    folder = RunFolder(run)
    for limits in (Limits(), Limits(max_hours=5)):
        assert is_over(folder, limits, asked_for=True)
        assert is_over(folder, limits, asked_for=False)
    shutil.rmtree(run / "fold_1")
    assert folds_gone(folder) == [run / "fold_1"]
    assert not is_over(folder, Limits(), asked_for=False)
    told: list[str] = []
    again = resume_folds(run, watch=lambda fold, count: [Warnings(told)])
    assert (again.exit_code, again.summary["status"]) == (0, "done")
    assert any(f"{run / 'fold_1'} is gone" in text for text in told)
    assert losses(run / "fold_1") == losses(folds.run / "fold_1")
    assert again.summary["cases"] == folds.summary["cases"]
    assert is_over(folder, Limits(), asked_for=True)


def test_a_fold_that_went_on_by_itself_is_pooled_anew(folds: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "all"
    shutil.copytree(folds.run, run)
    resume(run / "fold_1", assignments=["training.epochs=3"])
    assert not is_over(RunFolder(run), Limits(), asked_for=False)
    again = resume_folds(run, asked_for=False)
    own = json.loads((run / "fold_1/summary.json").read_text())
    assert own["cases"] != json.loads((folds.run / "fold_1/summary.json").read_text())["cases"]
    assert again.summary["status"] == "done"
    assert again.summary["steps"] == 35
    assert again.summary["folds"][1]["best"] == own["best"]
    assert {name: again.summary["cases"][name] for name in own["cases"]} == own["cases"]
    assert losses(run / "fold_0") == losses(folds.run / "fold_0")
    assert is_over(RunFolder(run), Limits(), asked_for=False)


def test_early_stopping_of_a_fold_does_not_end_the_others(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(
        data__split={"kind": "kfold", "folds": 2},
        training__epochs=9,
        training__iterations_per_epoch=1,
        training__early_stopping={"patience": 1, "threshold": 0.9},
    )
    result = train_folds(recipe, data=phantoms, run=tmp_path / "all", device="cpu")
    assert (result.summary["status"], result.summary["steps"]) == ("done", 4)


def test_other_splits_are_refused_before_anything_is_written(tiny, phantoms: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="all folds need data.split.kind: kfold, and the recipe has last"):
        train_folds(
            tiny(data__split={"kind": "last", "validation": 2}), data=phantoms, run=tmp_path / "all", device="cpu"
        )
    assert not (tmp_path / "all").exists()


def test_a_failure_before_the_first_step_makes_room(recipe, phantoms: Path, tmp_path: Path) -> None:
    bad = recipe.with_values({("data", "source"): {"kind": "nnunet"}}, "a test")
    with pytest.raises(DataError):
        train_folds(bad, data=tmp_path, run=tmp_path / "all", device="cpu")
    result = train_folds(recipe, data=phantoms, run=tmp_path / "all", device="cpu")
    assert result.exit_code == 0


def test_the_ensemble_predicts_the_mean_of_its_networks(folds: RunResult, phantoms: Path, tmp_path: Path) -> None:
    image = sorted((phantoms / "imagesTr").iterdir())[0]
    trained = open_run(folds.run, "cpu")
    assert "an ensemble of the 3 folds" in trained.weights
    done = predict(trained, image, tmp_path, lambda done, total: None, StopRequest())
    from fasttrain.data.preprocess import Preprocess
    from fasttrain.samples import Case

    preprocess = Preprocess(trained.recipe, training=False)
    sample = preprocess.as_sample(preprocess(Case("a", (image,), None)))
    singles = [open_run(folds.run / f"fold_{fold}", "cpu").predictor.probabilities(sample) for fold in range(3)]
    torch.testing.assert_close(trained.predictor.probabilities(sample), torch.stack(singles).mean(0))
    assert np.asarray(nib.load(done.written[0]).dataobj).shape == nib.load(image).shape
    with pytest.raises(RecipeError, match="holds all folds, and each case was trained on"):
        evaluate(trained, "validation", None, lambda done, total: None, StopRequest())


def test_the_dice_of_slices_is_pooled_over_folds(tiny, phantoms: Path, tmp_path: Path) -> None:
    sliced = {
        "data__slices": {"axis": "axial"},
        "patch__size": [16, 24],
        "augment": {},
        "validation__mirror": [],
        "training__epochs": 1,
    }
    recipe = tiny(data__split={"kind": "kfold", "folds": 2}, **sliced)
    whole = train_folds(recipe, data=phantoms, run=tmp_path / "all", device="cpu").summary
    slices = []
    for fold in range(2):
        found = evaluate(
            open_run(tmp_path / f"all/fold_{fold}", "cpu"), "validation", None, lambda done, total: None, StopRequest()
        )
        slices += [one.classes[0].slice_dices for one in found.cases]
    every = [dice for case in slices for dice in case]
    assert whole["slice_counts"]["liver"] == len(every) > len(slices)
    assert whole["slice_dice_by_class"]["liver"] == pytest.approx(float(np.mean(every)))
    assert whole["slice_dice"] == pytest.approx(
        np.mean([whole["slice_dice_by_class"][name] for name in ("liver", "kidney")])
    )


def test_folds_of_volumes_have_no_slices(folds: RunResult) -> None:
    assert "slice_dice" not in folds.summary


def test_a_dry_run_of_all_folds_of_another_split_is_refused(phantoms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--recipe", "spleen", "--data", str(phantoms), "--fold", "all", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        command(words)
    assert ended.value.code == 2
    assert "all folds need data.split.kind: kfold, and the recipe has " in capsys.readouterr().err
