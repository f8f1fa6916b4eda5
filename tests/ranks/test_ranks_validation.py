"""Validation dealt to several ranks: each case once, the score of all the same on every rank, stops alike."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain import load_recipe
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.validation import Validator
from fasttrain.machine.ranks import ONLY_ONE
from tests.ranks_running import in_ranks

SIZE = 16


class Bright(torch.nn.Module):
    """Class 1 above a half."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        classes = (image[:, 0] > 0.5).long()
        return torch.nn.functional.one_hot(classes, 2).movedim(-1, 1).float() * 20


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five cases the label of the first is what is bright, and of the others what is not there."""
    root = tmp_path_factory.mktemp("five")
    for folder in ("images", "labels"):
        (root / folder).mkdir()
    for number in range(5):
        bright = np.zeros((SIZE,) * 3, np.float32)
        bright[2:6, 3:9, 4:8] = 1
        label = bright if number == 0 else np.roll(bright, 8, axis=0)
        nib.save(nib.Nifti1Image(bright, np.eye(4)), root / "images" / f"case{number}.nii.gz")
        nib.save(nib.Nifti1Image(label.astype(np.uint8), np.eye(4)), root / "labels" / f"case{number}.nii.gz")
    return root


def validated(ranks: Any, values: dict, root: Path, count: int, stop_in: int = -1) -> Any:
    """(headline, cases with their Dice, cases that this rank predicted); the word `stopped` where it was."""
    torch.set_num_threads(1)
    recipe = load_recipe("demo", values).recipe
    cases = find_cases(recipe.data, root).every[:count]
    source = open_case_source("memory", cases, Preprocess(recipe, training=False), 1)
    predictor = Predictor(Bright(), recipe, Precision("cpu", None, None), torch.device("cpu"))
    seen: list[str] = []
    validator = Validator(
        predictor, source, cases, recipe, True, looked_at=lambda name, *rest: seen.append(name), ranks=ranks
    )
    stop = StopRequest()
    if ranks.place.rank == stop_in:
        stop.ask("the test", 143)
    try:
        scores = validator.run(stop, lambda done, total: None)
    except Stopped:
        return "stopped"
    return scores.summary.dice, {one.name: one.classes[0].dice for one in scores.cases}, seen


@pytest.fixture
def values(tiny_values: dict) -> dict:
    return {
        **tiny_values,
        "data.source": {"kind": "folders"},
        "data.classes": {1: "bright"},
        "data.spacing": None,
        "data.intensity": {"kind": "none"},
        "augment.flip": None,
        "validation.grid": "original",
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_five_cases_of_which_one_is_right_give_a_fifth(ranks: int, values: dict, five: Path) -> None:
    found = [validated(ONLY_ONE, values, five, 5)] if ranks == 1 else in_ranks(ranks, validated, values, five, 5)
    for headline, cases, _ in found:
        assert headline == pytest.approx(0.2)
        assert cases == {"case0": 1.0, "case1": 0.0, "case2": 0.0, "case3": 0.0, "case4": 0.0}
    assert sorted(name for one in found for name in one[2]) == [f"case{number}" for number in range(5)]


def test_one_case_on_two_ranks_is_scored_by_one_and_known_to_both(values: dict, five: Path) -> None:
    found = in_ranks(2, validated, values, five, 1)
    assert [one[:2] for one in found] == [(1.0, {"case0": 1.0})] * 2
    assert [one[2] for one in found] == [["case0"], []]


def test_a_stop_of_one_rank_is_one_of_all(values: dict, five: Path) -> None:
    assert in_ranks(2, validated, values, five, 5, 1) == ["stopped", "stopped"]
