"""Runs on regions that overlap: trained, resumed, scored by hand from the files, predicted as labels, drawn."""

import csv
import functools
import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.checkpoints import read_checkpoint
from fasttrain.data.restore import class_map_in_source_grid, drawn_regions
from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.delivery.export.bundle_configs import _postprocessing
from fasttrain.engine.run import RunResult, resume, train
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve
from fasttrain.samples import Grid
from fasttrain.scoring import score_case
from fasttrain.telemetry.events import EpochEnded, Event
from fasttrain.telemetry.metrics_csv import read_metrics

ORGANS = {"organs": [1, 2], "kidney": [2]}
SETTINGS = {
    "data__regions": ORGANS,
    "loss": {"kind": "dice_focal", "squared": True},
    "optimizer": {"kind": "novograd", "learning_rate": 3e-2},
    "network__dropout": 0.0,
}


def silent(done: int, total: int) -> None: ...


def dice_by_hand(found: np.ndarray, label: np.ndarray, values: list[int]) -> float:
    ours, theirs = np.isin(found, values), np.isin(label, values)
    return 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum())


@pytest.fixture(scope="module")
def run(tiny, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("regions") / "run"
    recipe = tiny(**SETTINGS, output__pictures="last", validation__hd95=True)
    return train(recipe, data=phantoms, run=folder, device="cpu")


def test_regions_are_what_is_scored(run: RunResult) -> None:
    assert run.exit_code == 0
    header = next(csv.reader((run.run / "metrics.csv").open()))
    assert [name for name in header if name.startswith("val_")] == [
        *("val_dice", "val_dice_organs", "val_dice_kidney"),
        *("val_hd95", "val_hd95_organs", "val_hd95_kidney"),
    ]
    rows = read_metrics(run.run / "metrics.csv")
    best = max(rows, key=lambda row: row["val_dice"])
    assert best["val_dice"] == pytest.approx((best["val_dice_organs"] + best["val_dice_kidney"]) / 2)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert all(set(scores) == {"organs", "kidney"} for scores in run.summary["cases"].values())
    assert {path.name.split("_")[2] for path in (run.run / "pictures").iterdir()} == {"worst", "best"}


@pytest.mark.parametrize("part", ["validation", "training"])
def test_scores_are_those_of_a_count_by_hand(run: RunResult, phantoms: Path, tmp_path: Path, part: str) -> None:
    """Of the label files that `predict` writes, against the set's own."""
    trained = open_run(run.run, "cpu")
    scores = evaluate(trained, part, None, silent, StopRequest())
    assert len(scores.cases) == {"validation": 2, "training": 4}[part]
    (tmp_path / "in").mkdir()
    for score in scores.cases:
        shutil.copy(phantoms / f"imagesTr/{score.name}.nii.gz", tmp_path / "in")
    done = predict(trained, tmp_path / "in", tmp_path / "out", silent, StopRequest())
    assert len(done.written) == len(scores.cases)
    for score, path in zip(scores.cases, done.written, strict=True):
        found = np.asarray(nib.load(path).dataobj)
        assert set(np.unique(found)) <= {0, 1, 2}
        label = np.asarray(nib.load(phantoms / "labelsTr" / path.name).dataobj)
        by_hand = [dice_by_hand(found, label, values) for values in ORGANS.values()]
        assert [one.dice for one in score.classes] == pytest.approx(by_hand, abs=1e-9)
        assert scores.summary.dice_counts == dict.fromkeys(ORGANS, len(scores.cases))


def test_a_resumed_run_is_the_unbroken_one(run: RunResult, tiny, phantoms: Path, tmp_path: Path) -> None:
    class Halfway:
        def __init__(self) -> None:
            self.stop = StopRequest()

        def on_event(self, event: Event) -> None:
            if isinstance(event, EpochEnded) and event.epoch == 2:
                self.stop.ask("a test", 143)

        def close(self) -> None: ...

    halfway = Halfway()
    recipe = tiny(**SETTINGS, output__pictures="last", validation__hd95=True)
    train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[halfway], stop=halfway.stop)
    again = resume(tmp_path / "run", device="cpu")
    assert again.summary["cases"] == run.summary["cases"]
    ours, theirs = (read_metrics(one / "metrics.csv") for one in (again.run, run.run))
    assert [row["train_loss"] for row in ours] == [row["train_loss"] for row in theirs]
    weights = [read_checkpoint(one / "checkpoints/last.pt")["network"] for one in (again.run, run.run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_later_regions_are_drawn_over_earlier_ones() -> None:
    # whole, core, enhancing: nested as they should be, and an enhancing voxel outside of all others
    scores = torch.tensor([[0.9, 0.9, 0.9, 0.1, 0.5], [0.1, 0.9, 0.9, 0.1, 0.5], [0.1, 0.1, 0.9, 0.9, 0.5]])
    decide = drawn_regions((1, 2, 3))
    assert decide(scores).tolist() == [1, 2, 3, 3, 0]
    assert decide(scores.flip(0)).tolist() == [3, 3, 3, 1, 0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.frozensets(st.integers(1, 6), min_size=1), min_size=1, max_size=6, unique=True), st.randoms())
def test_a_perfect_network_scores_1_however_regions_overlap(sets: list[frozenset[int]], random: Random) -> None:
    used = sorted(set().union(*sets))
    regions = {f"r{number}": random.sample(sorted(one), len(one)) for number, one in enumerate(sets)}
    try:
        recipe = resolve(
            "brain-tumor", {"data.classes": {value: f"c{value}" for value in used}, "data.regions": regions}
        ).recipe
    except RecipeError as error:
        # A region before one that holds it is refused
        if "lies wholly inside" not in str(error):
            raise
        return
    found = recipe.regions
    label = torch.arange(len(used) + 1, dtype=torch.uint8).repeat(3).view(-1, 1, 1)
    perfect = torch.stack([torch.isin(label, torch.tensor(members)).float() for members in found.members])
    written = drawn_regions(found.written, found.exact)(perfect)
    score = score_case("a", written, label, len(used) + 1, (1.0, 1.0, 1.0), False, regions=found.members)
    assert [one.dice for one in score.classes] == [1.0] * len(sets)
    # And a class that no other has the regions of is written as itself
    signs = [tuple(index in members for members in found.members) for index in range(len(used) + 1)]
    alone = [index for index, own in enumerate(signs) if signs.count(own) == 1]
    assert all(int(written[index, 0, 0]) == index for index in alone)


@pytest.mark.parametrize("regions", [{"a": [1, 2], "b": [2, 3]}, {"a": [1, 2, 3], "b": [2, 3], "c": [3]}])
def test_an_exported_bundle_writes_the_classes_that_predict_writes(regions: dict[str, list[int]]) -> None:
    recipe = resolve("brain-tumor", {"data.classes": {1: "x", 2: "y", 3: "z"}, "data.regions": regions}).recipe
    steps = _postprocessing(SimpleNamespace(recipe=recipe, answer="regions"))
    text = next(one["func"] for one in steps if one["_target_"] == "Lambdad")
    scores = torch.rand((len(regions), 6, 6, 6), generator=torch.Generator().manual_seed(0))
    found = eval(text.removeprefix("$"), {"functools": functools, "torch": torch})(scores)
    assert torch.equal(found[0].to(torch.uint8), drawn_regions(recipe.regions.written, recipe.regions.exact)(scores))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_nested_regions_are_drawn_bit_for_bit_as_before(seed: int) -> None:
    values = {1: "necrosis", 2: "oedema", 4: "enhancing"}
    brats = {"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]}
    found = resolve("brain-tumor", {"data.classes": values, "data.regions": brats}).recipe.regions
    scores = torch.rand((3, 5, 6, 7), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(drawn_regions(found.written, found.exact)(scores), drawn_regions(found.written)(scores))


def test_probabilities_are_interpolated_before_they_are_drawn() -> None:
    """On a grid twice as fine the border of each region is where its own probability crosses a half."""
    grid, fine = Grid((2, 1, 1), np.diag([4.0, 1, 1, 1])), Grid((5, 1, 1), np.eye(4))
    scores = torch.tensor([[1.0, 0.2], [1.0, 0.0]]).view(2, 2, 1, 1)
    found = class_map_in_source_grid(scores, grid, fine, drawn_regions((1, 2)))
    # 1, 0.8, 0.6, 0.4, 0.2 and 1, 0.75, 0.5, 0.25, 0
    assert found.flatten().tolist() == [2, 2, 1, 0, 0]


@pytest.mark.gpu
def test_a_gpu_trains_and_scores_them(tiny, phantoms: Path, tmp_path: Path) -> None:
    """Resident volumes, recorded steps and windows, and the loss by kernels."""
    settings = {**SETTINGS, "acceleration__channels_last": "auto", "acceleration__amp": "auto"}
    recipe = tiny(**settings, data__cache__kind="gpu", data__workers="auto", training__iterations_per_epoch=40)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cuda")
    decisions = {one["name"]: one["value"] for one in json.loads((result.run / "plan.json").read_text())["decisions"]}
    assert [decisions[name] for name in ("loss_kernels", "cuda_graphs", "cache")] == ["on", "on", "gpu"]
    assert read_metrics(result.run / "metrics.csv")[-1]["val_dice_organs"] > 0.3
    on_cpu, on_gpu = (
        evaluate(open_run(result.run, device), "validation", None, silent, StopRequest()).summary.dice
        for device in ("cpu", "cuda")
    )
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)
