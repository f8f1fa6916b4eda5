"""Training on sound cases alone: faulty ones are refused before there is a run, or left out, told and recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from fasttrain import train
from fasttrain.data.checking import reading_pass
from fasttrain.engine.folds import train_folds
from fasttrain.engine.run import prepare, resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError
from fasttrain.telemetry.events import Event, Message, StepLogged

SOURCE = {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}


class Heard:
    def __init__(self, stop: StopRequest | None = None, at: int = 0) -> None:
        self.warnings: list[str] = []
        self.stop, self.at = stop, at

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message) and event.level == "warning":
            self.warnings.append(event.text)
        if self.stop is not None and isinstance(event, StepLogged) and event.step == self.at:
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


@pytest.fixture
def data(phantoms: Path, tmp_path: Path) -> Path:
    """The phantoms as plain folders; the second of the four training cases is cut short."""
    root = tmp_path / "data"
    shutil.copytree(phantoms, root)
    second = images(root)[1]
    second.write_bytes(second.read_bytes()[:5000])
    return root


def images(root: Path) -> list[Path]:
    return sorted(root.glob("imagesTr/*.nii.gz"))


def name_of(path: Path) -> str:
    return path.name.removesuffix(".nii.gz")


@pytest.fixture
def skipping(tiny) -> Callable[..., Any]:
    return lambda **more: tiny(data__source=SOURCE, data__bad_cases="skip", training__epochs=2, **more)


def test_faulty_cases_are_left_out_told_and_recorded(skipping, data: Path, tmp_path: Path) -> None:
    heard, bad = Heard(), name_of(images(data)[1])
    names = [name_of(path) for path in images(data)]
    result = train(skipping(), data=data, run=tmp_path / "run", device="cpu", observers=[heard])
    assert result.exit_code == 0
    assert any("left out 1 faulty case" in text and bad in text for text in heard.warnings)
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["cases"]["training"] == [names[0], *names[2:4]]
    assert plan["cases"]["validation"] == names[4:]
    assert plan["sizes"]["training_cases"] == 3
    for record in (plan["skipped_cases"], result.summary["skipped_cases"]):
        assert list(record) == [bad]
        assert "too early" in record[bad][0]
    events = [json.loads(line) for line in (result.run / "events.jsonl").read_text().splitlines()]
    assert [event["skipped_cases"] for event in events if event["event"] == "RunStarted"] == [[bad]]


def test_refused_before_there_is_a_run(tiny, data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too early"):
        train(tiny(data__source=SOURCE), data=data, run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_sound_set_records_nothing_left_out(tiny, phantoms: Path) -> None:
    heard = Heard()
    prepared = prepare(tiny(data__bad_cases="skip").recipe, phantoms, "cpu", heard.on_event)
    assert prepared.skipped == {}
    assert heard.warnings == []


def test_the_folds_stay_what_they_are(tiny, phantoms: Path, data: Path) -> None:
    split = {"kind": "kfold", "folds": 3}
    bad = name_of(images(data)[1])
    for fold in range(3):
        values = {"data__source": SOURCE, "data__split": {**split, "fold": fold}, "data__bad_cases": "skip"}
        whole = prepare(tiny(**values).recipe, phantoms, "cpu").split
        left = prepare(tiny(**values).recipe, data, "cpu").split
        for part, rest in ((whole.train, left.train), (whole.validation, left.validation)):
            assert [case.name for case in rest] == [case.name for case in part if case.name != bad]


def test_a_resume_finds_the_same_cases(skipping, data: Path, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", StopRequest()
    train(skipping(), data=data, run=run, device="cpu", observers=[Heard(stop, 7)], stop=stop)
    before = json.loads((run / "plan.json").read_text())
    heard = Heard()
    result = resume(run, observers=[heard])
    assert result.exit_code == 0
    assert any("left out 1 faulty case" in text for text in heard.warnings)
    assert json.loads((run / "plan.json").read_text()) == before
    assert list(result.summary["skipped_cases"]) == [name_of(images(data)[1])]


def test_a_case_that_was_mended_meanwhile_is_not_slipped_in(
    skipping, phantoms: Path, data: Path, tmp_path: Path
) -> None:
    run, stop = tmp_path / "run", StopRequest()
    train(skipping(), data=data, run=run, device="cpu", observers=[Heard(stop, 7)], stop=stop)
    began_with = json.loads((run / "plan.json").read_text())["cases"]
    shutil.copy(images(phantoms)[1], images(data)[1])
    heard = Heard(StopRequest(), 10**9)
    result = resume(run, observers=[heard])
    assert result.summary["status"] == "done"
    assert list(result.summary["skipped_cases"]) == [name_of(images(data)[1])]
    assert json.loads((run / "plan.json").read_text())["cases"] == began_with
    mended = name_of(images(data)[1])
    assert f"left out when the run began and sound now: {mended}; only a new run takes them in" in heard.warnings
    assert not [text for text in heard.warnings if text.startswith("left out:")]
    assert "too early" in result.summary["skipped_cases"][mended][0]


def test_a_case_that_is_faulty_since_the_run_began_is_refused_by_its_fault(
    skipping, data: Path, tmp_path: Path
) -> None:
    run, stop = tmp_path / "run", StopRequest()
    train(skipping(), data=data, run=run, device="cpu", observers=[Heard(stop, 7)], stop=stop)
    since = images(data)[2]
    whole = since.read_bytes()
    since.write_bytes(b"")
    with pytest.raises(DataError) as refused:
        resume(run)
    assert len(refused.value.faults) == 2
    assert f"{since} is empty (0 bytes)" in refused.value.faults[0]
    assert f"the run began with {name_of(since)} sound, and cannot go on without" in refused.value.faults[1]
    since.write_bytes(whole)
    assert resume(run).exit_code == 0


def test_no_case_left_is_refused(skipping, data: Path, tmp_path: Path) -> None:
    for path in images(data)[-2:]:
        path.write_bytes(b"")
    with pytest.raises(DataError, match="leaves no validation case"):
        train(skipping(), data=data, run=tmp_path / "run", device="cpu")


def test_all_folds_record_what_was_left_out(skipping, data: Path, tmp_path: Path) -> None:
    recipe = skipping(data__split={"kind": "kfold", "folds": 2}, training__iterations_per_epoch=1)
    result = train_folds(recipe, data=data, run=tmp_path / "all", device="cpu")
    bad = name_of(images(data)[1])
    assert list(result.summary["skipped_cases"]) == [bad]
    assert sorted(result.summary["cases"]) == sorted(name_of(path) for path in images(data) if name_of(path) != bad)


def test_files_are_read_once_for_dry_run_training_and_resume(
    tiny, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    read: list[Path] = []
    really = reading_pass.read_facts
    monkeypatch.setattr(reading_pass, "read_facts", lambda path, view: read.append(path) or really(path, view))
    recipe, stop = tiny(training__epochs=1), StopRequest()
    prepare(recipe.recipe, phantoms, "cpu")
    assert len(read) == len(set(read)) == 12
    train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[Heard(stop, 3)], stop=stop)
    resume(tmp_path / "run")
    assert len(read) == 12


def test_an_empty_label_is_told_and_trained_on(tiny, phantoms: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(phantoms, root)
    label = sorted(root.glob("labelsTr/*.nii.gz"))[0]
    image = nib.load(label)
    nib.save(nib.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine), label)
    heard = Heard()
    recipe = tiny(data__source=SOURCE, training__epochs=1)
    result = train(recipe, data=root, run=tmp_path / "run", device="cpu", observers=[heard])
    assert result.exit_code == 0
    assert [text for text in heard.warnings if "nothing but background" in text] == [
        f"the label of case {name_of(label)} holds nothing but background; the case is trained on as background"
    ]
    assert name_of(label) in json.loads((result.run / "plan.json").read_text())["cases"]["training"]


def test_cases_whose_files_do_not_pair_are_left_out_beside_damaged_ones(skipping, data: Path, tmp_path: Path) -> None:
    names = [name_of(path) for path in images(data)]
    split = {"kind": "last", "validation": 2}
    (data / "labelsTr" / images(data)[0].name).unlink()
    images(data)[5].unlink()
    heard = Heard()
    result = train(skipping(data__split=split), data=data, run=tmp_path / "run", device="cpu", observers=[heard])
    assert result.exit_code == 0
    plan = json.loads((result.run / "plan.json").read_text(encoding="utf-8"))
    assert plan["cases"] == {"training": names[2:4], "validation": names[4:5], "test": []}
    assert list(plan["skipped_cases"]) == [names[0], names[1], names[5]]
    assert "has no label" in plan["skipped_cases"][names[0]][0]
    assert "has no image" in plan["skipped_cases"][names[5]][0]
    told = [text for text in heard.warnings if text.startswith("left out: ")]
    assert len(told) == 3
    # All in one pass where they are refused
    recipe = skipping(data__split=split).recipe
    strict = recipe.model_copy(update={"data": recipe.data.model_copy(update={"bad_cases": "refuse"})})
    with pytest.raises(DataError) as refused:
        prepare(strict, data, "cpu")
    assert [fault for fault in refused.value.faults if "has no label" in fault or "has no image" in fault]
    assert any("too early" in fault for fault in refused.value.faults)


def test_a_listed_file_that_does_not_exist_is_its_case_s_fault(tiny, phantoms: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(phantoms, root)
    gone, cut = images(root)[1:3]
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:5000])
    decathlon = {"data__source": {"kind": "decathlon"}}
    with pytest.raises(DataError) as refused:
        prepare(tiny(**decathlon).recipe, root, "cpu")
    first, second = refused.value.faults
    assert f"the image {gone} does not exist" in first
    assert str(cut) in second
    prepared = prepare(tiny(data__bad_cases="skip", **decathlon).recipe, root, "cpu")
    assert list(prepared.skipped) == [name_of(gone), name_of(cut)]
    assert len(prepared.split.train) == 2


def _far_from_zero(path: Path) -> None:
    image = nib.load(path)
    noise = np.random.default_rng(0).normal(size=image.shape)
    nib.save(nib.Nifti1Image(noise + 1e9, image.affine, dtype=np.float64), path)


def _coarse_spacing(path: Path) -> None:
    image = nib.load(path)
    affine = image.affine.copy()
    affine[:3, :3] *= 1e5
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), affine), path)


@pytest.mark.parametrize("spoil", [_far_from_zero, _coarse_spacing])
def test_what_training_would_refuse_the_check_refuses_or_leaves_out(
    spoil: Callable[[Path], None], skipping, tiny, phantoms: Path, tmp_path: Path
) -> None:
    data = tmp_path / "spoilt"
    shutil.copytree(phantoms, data)
    spoil(images(data)[2])
    with pytest.raises(DataError, match=images(data)[2].name):
        train(tiny(data__source={"kind": "decathlon"}), data=data, run=tmp_path / "refused", device="cpu")
    assert not (tmp_path / "refused").exists()
    result = train(skipping(), data=data, run=tmp_path / "run", device="cpu")
    assert name_of(images(data)[2]) in result.summary["skipped_cases"]
