"""Predictions slice by slice, and the Dice of slices beside that of volumes."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
import torch
from sliced_cases import sliced_recipe

from fasttrain.engine.step import Precision
from fasttrain.engine.validating.inference import Ensemble, Predictor
from fasttrain.engine.validating.validation import axis_across
from fasttrain.samples import IGNORED, Grid, Sample
from fasttrain.scoring import count_case, count_slices, score_counts, summarise, with_slices

CPU = torch.device("cpu")


class SumOfChannels(torch.nn.Module):
    """The logit is a weighted sum of the channels, so that each one's place shows; it takes planes alone."""

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        assert windows.ndim == 4
        weights = torch.arange(1.0, windows.shape[1] + 1).view(1, -1, 1, 1)
        return (windows * weights).sum(1, keepdim=True)


def sample(channels: int, shape: tuple[int, ...] = (6, 21, 30)) -> Sample:
    image = torch.randn(channels, *shape, generator=torch.Generator().manual_seed(0))
    # The file has the slices last, the second plane axis first and the first one turned round
    source = np.array([[0, 0, 2.0, 0], [-1.0, 0, 0, shape[1] - 1], [0, 1.5, 0, 0], [0, 0, 0, 1]])
    to_file = np.zeros((4, 4))
    to_file[2, 0] = to_file[1, 2] = to_file[3, 3] = 1
    to_file[0, 1], to_file[0, 3] = -1, shape[1] - 1
    grid = Grid(shape, source @ to_file)
    return Sample("case", image, None, (), None, grid, Grid((shape[1], shape[2], shape[0]), source))


@pytest.mark.parametrize("neighbours", [0, 1, 7])
@pytest.mark.parametrize("mirror", [[], [0, 1]])
def test_a_volume_is_predicted_slice_by_slice(neighbours: int, mirror: list[int]) -> None:
    recipe = sliced_recipe(slices={"neighbours": neighbours}, channels=["a", "b"])
    recipe = recipe.model_copy(update={"validation": recipe.validation.model_copy(update={"mirror": tuple(mirror)})})
    one = sample(2)
    predictor = Predictor(SumOfChannels(), recipe, Precision("cpu", None, None), CPU)
    found = predictor.probabilities(one)[1]
    stacked = []
    for number in range(6):
        around = [min(max(number + step, 0), 5) for step in range(-neighbours, neighbours + 1)]
        channels = torch.cat([one.image[:, at] for at in around])
        weights = torch.arange(1.0, len(channels) + 1).view(-1, 1, 1)
        stacked.append(torch.sigmoid((channels * weights).sum(0)))
    assert torch.allclose(found, torch.stack(stacked), atol=1e-5)
    both = Ensemble([predictor, predictor]).probabilities(one)[1]
    assert torch.allclose(both, found, atol=1e-6)
    # On the grid of the file
    written = predictor.class_map(one, True)
    assert written.shape == one.source_grid.shape
    turned = (torch.stack(stacked) > 0.5).permute(1, 2, 0).flip(0)
    assert torch.equal(written.bool(), turned)
    assert axis_across(one.grid, one.source_grid) == 2
    assert axis_across(one.grid, one.grid) == 0


def test_slices_are_counted_as_one_would_by_hand() -> None:
    label, prediction = torch.zeros(4, 5, 3, dtype=torch.uint8), torch.zeros(4, 5, 3, dtype=torch.uint8)
    label[:2, :2, 0], prediction[:2, :4, 0] = 1, 1  # 4 of 4 and 8: 8 / 12
    label[0, 0, 1] = 1  # missed: 0
    prediction[3, 4, 2] = 2  # invented: 0
    counts = count_slices(prediction, label, 2, 4)
    assert counts.shape == (3, 3, 3)
    volume = score_counts("one", count_case(prediction, label, 4).tolist())
    score = with_slices(volume, counts.tolist())
    assert [one.slice_dices for one in score.classes] == [(8 / 12, 0.0), (0.0,), ()]
    assert score.classes[0].dice == pytest.approx(2 * 4 / (5 + 8))
    summary = summarise([score], ["a", "b", "c"])
    assert summary.slice_dice_by_class == {"a": pytest.approx(1 / 3), "b": 0.0, "c": None}
    assert summary.slice_dice == pytest.approx(1 / 6)
    assert summary.slice_counts == {"a": 2, "b": 1, "c": 0}
    assert summary.dice == pytest.approx(fmean([8 / 13, 0.0])), "the headline is that of volumes"


def test_means_of_slices_weigh_slices_and_not_cases() -> None:
    scores = []
    for name, slices in (("short", 1), ("long", 3)):
        label = torch.ones(slices, 2, 2, dtype=torch.uint8)
        prediction = label if name == "long" else torch.zeros_like(label)
        counts = count_slices(prediction, label, 0, 2)
        scores.append(with_slices(score_counts(name, count_case(prediction, label, 2).tolist()), counts.tolist()))
    summary = summarise(scores, ["a"])
    assert (summary.dice, summary.slice_dice) == (0.5, 0.75)


def test_ignored_voxels_and_regions_in_slices() -> None:
    label, prediction = torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, 4, 4, dtype=torch.uint8)
    label[0, 0], label[0, 1], label[1] = 1, 2, IGNORED
    prediction[0, :3], prediction[1] = 1, 1
    counts = count_slices(prediction, label, 0, 3, ignores=True, regions=[(1, 2), (2,)])
    assert counts.tolist() == [[[8, 0], [0, 0]], [[12, 0], [0, 0]], [[8, 0], [4, 0]]]


def test_without_slices_nothing_is_told_of_them() -> None:
    label = torch.ones(2, 2, 2, dtype=torch.uint8)
    summary = summarise([score_counts("one", count_case(label, label, 2).tolist())], ["a"])
    assert (summary.slice_dice, summary.slice_dice_by_class, summary.slice_counts) == (None, {}, {})
