"""`data.label_map` and `data.ignore_label` from the recipe to the scores, the pictures and the files that predict writes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain import train
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.engine.planning.trial import Candidate, measure
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.pictures import planes_of
from fasttrain.engine.validating.validation import Judged, Scores, Validator
from fasttrain.losses import build_loss, loss_of
from fasttrain.machine.hardware import survey
from fasttrain.recipe import Recipe
from fasttrain.samples import IGNORED, Batch, Grid, Sample


def silent(done: int, total: int) -> None: ...


def write_set(root: Path, labels: list[np.ndarray], image_of: np.ndarray | None = None) -> Path:
    """One case a label; the image is the label's own values unless another is given."""
    affine = np.diag([-1.0, 1.5, 2.0, 1.0])
    for number, label in enumerate(labels):
        for folder, values in (("images", label if image_of is None else image_of), ("labels", label)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values.astype(np.uint8), affine), root / folder / f"case{number}.nii.gz")
    return root


def relabelled(phantoms: Path, root: Path, change: dict[int, int]) -> Path:
    """The phantoms with other values in their labels."""
    for part in ("images", "labels"):
        shutil.copytree(phantoms / f"{part}Tr", root / part)
    for path in (root / "labels").iterdir():
        image = nib.load(path)
        values = np.asarray(image.dataobj)
        table = np.arange(256)
        table[list(change)] = list(change.values())
        nib.save(nib.Nifti1Image(table[values].astype(np.uint8), image.affine), path)
    return root


class Bright(torch.nn.Module):
    """Class 1 where the image is above `level`."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        above = (image[:, :1] > self.level).float() * 20
        return torch.cat([torch.full_like(above, 10.0), above], dim=1)


FOLDERS = {"data__source": {"kind": "folders"}, "data__intensity": {"kind": "none"}, "data__spacing": None}


def validate(recipe: Recipe, data: Path, level: float) -> tuple[Validator, Scores]:
    cases = find_cases(recipe.data, data).cases
    source = open_case_source("none", cases, Preprocess(recipe, training=False), 1)
    predictor = Predictor(Bright(level), recipe, Precision("cpu", None, None), torch.device("cpu"))
    validator = Validator(predictor, source, cases, recipe, keep_labels=False)
    return validator, validator.run(StopRequest(), silent)


@pytest.mark.parametrize("grid", ["original", "preprocessed"])
def test_a_mask_of_0_and_255_and_a_perfect_prediction_have_a_dice_of_1(tiny, tmp_path: Path, grid: str) -> None:
    mask = np.zeros((20, 18, 16), np.uint8)
    mask[:10] = 255
    data = write_set(tmp_path, [mask, mask.transpose(1, 0, 2).copy()])
    more = {"data__classes": {1: "organ"}, "data__label_map": {255: 1}, "validation__grid": grid, **FOLDERS}
    _, scores = validate(tiny(validation__hd95=True, **more).recipe, data, 128.0)
    assert scores.summary.dice == 1.0
    assert scores.summary.background_dice == 1.0
    assert scores.summary.hd95 == 0.0


@pytest.mark.parametrize("grid", ["original", "preprocessed"])
def test_what_is_predicted_in_ignored_voxels_is_not_scored(tiny, tmp_path: Path, grid: str) -> None:
    label = np.zeros((20, 18, 16), np.uint8)
    label[4:10, 4:14, 4:12] = 1
    image = label * 100
    image[12:] = 200  # bright as the organ, and labelled by nobody
    seen = label.copy()
    seen[12:] = 255
    write_set(tmp_path / "ignored", [seen, seen], image)
    write_set(tmp_path / "false", [label, label], image)
    more = {"data__classes": {1: "organ"}, "validation__grid": grid, "validation__hd95": True, **FOLDERS}
    validator, scores = validate(tiny(data__ignore_label=255, **more).recipe, tmp_path / "ignored", 50.0)
    assert (scores.summary.dice, scores.summary.background_dice, scores.summary.hd95) == (1.0, 1.0, 0.0)
    _, control = validate(tiny(**more).recipe, tmp_path / "false", 50.0)
    assert control.summary.dice is not None
    assert control.summary.dice < 0.5
    axial, coronal, sagittal = planes_of(validator.judge(0))
    for plane, crosses in ((axial, True), (coronal, True), (sagittal, False)):
        assert plane.ignored is not None
        assert plane.ignored.any() == crosses
        assert not plane.prediction[plane.ignored].any()
        assert np.array_equal(plane.ignored, plane.label == IGNORED)


def test_slices_are_not_drawn_to_ignored_voxels() -> None:
    shape = (8, 7, 6)
    label = torch.full(shape, IGNORED, dtype=torch.uint8)
    label[..., 1] = 0
    label[2:4, 2:4, 1] = 1
    grid = Grid(shape, np.eye(4))
    image = torch.zeros(1, *shape)
    prediction = torch.ones(shape, dtype=torch.uint8)
    case = Judged(Sample("a", image, label[None], (), None, grid, grid), prediction, label, grid, ignores=True)
    axial = planes_of(case)[0]
    assert axial.label.max() == 1
    assert axial.ignored is not None
    assert not axial.ignored.any()
    # Without an ignore label the index 255 is the class of that number
    plain = planes_of(replace(case, ignores=False))[0]
    assert plain.ignored is None
    assert plain.label.min() == IGNORED


def test_declared_0_1_2_4_trains_with_four_channels_and_predicts_4_again(tiny, phantoms: Path, tmp_path: Path) -> None:
    """A value 9 in the files is read as 4 too, and 4 is what is written."""
    data = relabelled(phantoms, tmp_path / "data", {2: 4})
    changed = sorted((data / "labels").iterdir())[0]
    image = nib.load(changed)
    values = np.asarray(image.dataobj).copy()
    values[values == 4] = 9
    nib.save(nib.Nifti1Image(values.astype(np.uint8), image.affine), changed)
    recipe = tiny(
        data__source={"kind": "folders"}, data__classes={1: "a", 2: "b", 4: "c"}, data__label_map={9: 4},
        training__epochs=1, training__iterations_per_epoch=2,
    )  # fmt: skip
    result = train(recipe, data=data, run=tmp_path / "run", device="cpu")
    trained = open_run(result.run, "cpu")
    assert isinstance(trained.predictor, Predictor)
    assert recipe.recipe.output_channels == 4
    heads = [one for one in trained.predictor.network.modules() if getattr(one, "out_channels", None) == 4
             and getattr(one, "kernel_size", None) == (1, 1, 1)]  # fmt: skip
    assert heads
    with torch.no_grad():
        for head in heads:
            head.weight.zero_()
            head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))
    given = sorted((data / "images").iterdir())[0]
    done = predict(trained, given, tmp_path / "one.nii.gz", silent, StopRequest())
    assert np.unique(np.asarray(nib.load(done.written[0]).dataobj)).tolist() == [4]


def test_a_run_with_ignored_voxels(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The kidney is known of no case: 2 is ignored. Whether the file says so by 255 or by 2 makes no difference to the bit."""
    rows = []
    for value, more in ((255, {}), (2, {"data__label_map": {2: 255}})):
        data = relabelled(phantoms, tmp_path / f"data{value}", {2: value})
        recipe = tiny(
            data__source={"kind": "folders"}, data__classes={1: "liver"}, data__ignore_label=255,
            training__epochs=2, output__pictures="last", validation__hd95=True, network__deep_supervision=1, **more,
        )  # fmt: skip
        result = train(recipe, data=data, run=tmp_path / f"run{value}", device="cpu")
        assert result.exit_code == 0
        assert list((result.run / "pictures").glob("*.png"))
        again = evaluate(open_run(result.run, "cpu"), "validation", None, silent, StopRequest())
        assert again.summary.dice == result.summary["best"]["value"]
        header, *lines = (result.run / "metrics.csv").read_text().splitlines()
        names = header.split(",")
        kept = [names.index(name) for name in names if name == "train_loss" or name.startswith("val_")]
        rows.append([[line.split(",")[index] for index in kept] for line in lines])
        given = sorted((data / "images").iterdir())[0]
        done = predict(open_run(result.run, "cpu"), given, tmp_path / f"out{value}.nii.gz", silent, StopRequest())
        assert set(np.unique(np.asarray(nib.load(done.written[0]).dataobj))) <= {0, 1}
    assert rows[0] == rows[1]
    assert all(np.isfinite(float(row[0])) for row in rows[0])


def test_a_step_on_a_batch_of_ignored_voxels_alone_is_no_bad_step(tiny) -> None:
    network = torch.nn.Conv3d(1, 3, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loss = build_loss(tiny().recipe.loss, ignores=True)
    step = Step(network, loss, optimizer, Precision("cpu", None, None), accumulate=1)
    before = [one.detach().clone() for one in network.parameters()]
    label = torch.full((2, 1, 4, 4, 4), IGNORED, dtype=torch.uint8)
    batch = Batch(torch.randn(2, 1, 4, 4, 4), label, (0, 1), ("a", "b"))
    assert step(iter([batch]), 0.1).item() == pytest.approx(0.0, abs=1e-7)
    assert int(step.bad_streak) == 0
    assert all(torch.equal(one, other) for one, other in zip(before, network.parameters(), strict=True))


def test_what_is_measured_is_the_loss_that_trains(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import fasttrain.engine.planning.trial as trial

    asked: list[bool] = []
    monkeypatch.setattr(
        trial,
        "loss_of",
        lambda recipe, fused: (asked.append(loss_of(recipe, fused).loss.ignores), loss_of(recipe, fused))[1],
    )
    for ignore in (None, 255):
        recipe = tiny(data__ignore_label=ignore, training__batch_size=1).recipe
        measure(recipe, survey("cpu"), [Candidate("off", False)])
    assert asked == [False, True]
