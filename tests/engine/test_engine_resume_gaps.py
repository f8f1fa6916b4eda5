"""Where a run could go wrong in silence: sums of an epoch, checkpoints that are gone, starts cut short, odd names."""

import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import pytest

from fasttrain import train
from fasttrain.delivery import open_run, predict
from fasttrain.engine.run import RunResult, prepare, resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.telemetry.events import CheckpointSaved, Event, Message, RunStarted
from fasttrain.telemetry.metrics_csv import read_metrics


class Stopper:
    """Asks for a stop at an event, and keeps the messages that are more than information."""

    def __init__(self, moment) -> None:
        self.moment, self.stop, self.messages = moment, StopRequest(), []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message) and event.level != "info":
            self.messages.append(event.text)
        if self.moment(event):
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


def loss_column(run: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(run / "metrics.csv")]


def saves(name: str, epoch: int):
    return lambda event: isinstance(event, CheckpointSaved) and event.path.endswith(name) and event.epoch == epoch


@pytest.mark.parametrize("name", ["best.pt", "epoch_0001.pt", "last.pt"])
def test_a_stop_while_an_epochs_checkpoints_are_saved(
    name: str, tiny, phantoms: Path, whole_run: RunResult, tmp_path
) -> None:
    """The sums of the closed epoch must not become those of the next one."""
    recipe, stopper = tiny(output__keep_every=1), Stopper(saves(name, 1))
    run = tmp_path / "run"
    train(recipe, data=phantoms, run=run, device="cpu", observers=[stopper], stop=stopper.stop)
    resume(run)
    assert loss_column(run) == loss_column(whole_run.run)


def test_a_stop_after_a_restore_and_before_the_first_step(
    tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path
) -> None:
    run, first = tmp_path / "run", Stopper(lambda event: getattr(event, "step", 0) == 8)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[first], stop=first.stop)
    again = Stopper(lambda event: isinstance(event, RunStarted))
    resume(run, observers=[again], stop=again.stop)
    resume(run)
    assert loss_column(run) == loss_column(whole_run.run)


@pytest.mark.parametrize("whole_folder", [False, True])
def test_checkpoints_that_are_gone_are_no_reason_to_begin_anew(
    whole_folder: bool, tiny, phantoms, tmp_path: Path
) -> None:
    run, stopper = tmp_path / "run", Stopper(lambda event: getattr(event, "step", 0) == 12)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[stopper], stop=stopper.stop)
    before = (run / "metrics.csv").read_bytes()
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    if whole_folder:
        (run / "checkpoints").rmdir()
    with pytest.raises(StorageError, match="holds no checkpoint, but the run wrote some"):
        resume(run)
    assert (run / "metrics.csv").read_bytes() == before


def test_a_last_checkpoint_that_is_gone_is_said(tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    run, stopper = tmp_path / "run", Stopper(lambda event: getattr(event, "step", 0) == 12)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[stopper], stop=stopper.stop)
    (run / "checkpoints/last.pt").unlink()
    heard = Stopper(lambda event: False)
    resume(run, observers=[heard])
    assert any("last.pt is missing" in text for text in heard.messages)
    assert loss_column(run) == loss_column(whole_run.run)


@pytest.mark.parametrize(
    "left",
    [
        ["run.lock"],
        ["run.lock", "environment.json"],
        ["run.lock", "environment.json", "plan.json", ".recipe.yaml.7.part"],
    ],
)
def test_a_start_that_was_cut_short_is_no_dead_end(left: list[str], tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in left:
        (run / name).write_text("{")
    with pytest.raises(RecipeError, match="holds no run"):
        resume(run)
    assert train(tiny(training__epochs=1), data=phantoms, run=run, device="cpu").exit_code == 0


def test_other_files_still_keep_a_folder_from_being_a_run(tiny, phantoms: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("precious")
    with pytest.raises(RecipeError, match="is not empty and holds no run"):
        train(tiny(), data=phantoms, run=tmp_path / "run", device="cpu")


def test_file_names_that_are_no_utf8_train_and_resume(tiny, phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for part in ("imagesTr", "labelsTr"):
        (data / part).mkdir(parents=True)
        for number, path in enumerate(sorted((phantoms / part).iterdir())):
            shutil.copy(path, os.path.join(os.fsencode(data / part), b"M\xfcller%d.nii.gz" % number))
    recipe = tiny(data__source={"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}, training__epochs=2)
    stopper = Stopper(lambda event: getattr(event, "step", 0) == 7)
    run = tmp_path / os.fsdecode(b"l\xe4uf")
    train(recipe, data=data, run=run, device="cpu", observers=[stopper], stop=stopper.stop)
    result = resume(run)
    assert result.exit_code == 0
    assert all("ller" in name for name in result.summary["cases"])
    plan = json.loads((run / "plan.json").read_text())
    assert os.fsencode(plan["cases"]["validation"][0]) == b"M\xfcller4"


def test_a_pipe_among_the_images_does_not_hang(tiny, phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    image = sorted((data / "imagesTr").iterdir())[0]
    image.unlink()
    os.mkfifo(image)
    with pytest.raises(DataError, match="is no regular file"):
        train(_folders(tiny), data=data, run=tmp_path / "run", device="cpu")


def _folders(tiny, **more: object):
    return tiny(data__source={"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}, **more)


def test_a_dry_run_sees_what_headers_show(tiny, phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    assert prepare(_folders(tiny).recipe, data, "cpu").plan.sizes.training_cases == 4
    with pytest.raises(DataError, match="1 channel, but data.channels names 2"):
        prepare(_folders(tiny, data__channels=["T1", "T2"]).recipe, data, "cpu")
    label = sorted((data / "labelsTr").iterdir())[0]
    whole = nib.load(label)
    nib.save(nib.Nifti1Image(whole.dataobj[:-1], whole.affine), label)
    with pytest.raises(DataError, match="has the shape"):
        prepare(_folders(tiny).recipe, data, "cpu")


@pytest.mark.parametrize("spacing", [1e-9, 1e-300])
def test_a_spacing_that_no_memory_could_hold_is_refused(spacing: float, tiny, phantoms: Path) -> None:
    with pytest.raises(RecipeError, match="makes .* voxels of .*; its own spacing is"):
        prepare(tiny(data__spacing=[spacing] * 3).recipe, phantoms, "cpu")


def test_files_that_predict_passes_over_are_told(tiny, phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for part in ("imagesTr", "labelsTr"):
        (data / part).mkdir(parents=True)
        for path in (phantoms / part).iterdir():
            shutil.copy(path, data / part / (path.name.replace(".nii", "_t1.nii") if part == "imagesTr" else path.name))
    source = {"kind": "folders", "images": "imagesTr", "labels": "labelsTr", "image_suffixes": ["_t1"]}
    result = train(tiny(data__source=source, training__epochs=1), data=data, run=tmp_path / "run", device="cpu")
    (tmp_path / "new").mkdir()
    for name in ("a_t1.nii.gz", "plain.nii.gz"):
        shutil.copy(sorted((data / "imagesTr").iterdir())[0], tmp_path / "new" / name)
    run, said = open_run(result.run, "cpu"), []
    done = predict(run, tmp_path / "new", tmp_path / "out", lambda done, total: None, StopRequest(), warn=said.append)
    assert [path.name for path in done.written] == ["a.nii.gz"]
    assert said == ["1 NIfTI file does not end as the recipe's data.source says and was passed over (plain.nii.gz)"]
    assert [path.name for path in done.passed_over] == ["plain.nii.gz"]


def test_records_that_were_cut_or_edited_are_told(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, stopper = tmp_path / "run", Stopper(lambda event: getattr(event, "step", 0) == 12)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[stopper], stop=stopper.stop)
    quiet = Stopper(lambda event: getattr(event, "step", 0) == 13)
    resume(run, observers=[quiet], stop=quiet.stop)
    assert quiet.messages == []
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text[: text.index("output:")])
    table = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text(table[0])
    heard = Stopper(lambda event: False)
    resume(run, observers=[heard])
    assert any("recipe.yaml is not the recipe that the run began with" in message for message in heard.messages)
    assert any("has 0 rows for 2 epochs" in message for message in heard.messages)
