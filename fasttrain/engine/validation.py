"""Owns the scoring of whole validation volumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasttrain.data.reading import read_label
from fasttrain.engine.inference import Ensemble, Predictor, WindowsTold, WithinTold, telling
from fasttrain.engine.stop import StopRequest
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource, Grid, Sample
from fasttrain.scoring import CaseScore, ScoreSummary, score_case, summarise


@dataclass(frozen=True)
class Scores:
    """The scores of one validation: in all, case by case, and how long it took."""

    summary: ScoreSummary
    cases: tuple[CaseScore, ...]
    seconds: float


MOST_PREDICTIONS_KEPT = 3
"""So few cases are kept where they are wanted again, since predicting them once more would be a second validation."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A case as it is scored: `prediction` and `label` are uint8 class indices [*spatial] on `grid` and on one device.

    ignores: the label may hold IGNORED, where nothing is scored, whatever is predicted there.
    """

    sample: Sample
    prediction: Tensor
    label: Tensor
    grid: Grid
    ignores: bool = False


class Validator:
    """Predicts and scores every validation case.

    Against the grid of the file the label is the file's own, read once and kept as uint8 where `keep_labels` says that the
    cases are kept in memory anyway. `keep_predictions`: cases are asked for by `judge` after they were scored.
    """

    def __init__(
        self,
        predictor: Predictor | Ensemble,
        source: CaseSource,
        cases: Sequence[Case],
        recipe: Recipe,
        keep_labels: bool,
        keep_predictions: bool = False,
    ) -> None:
        self.predictor = predictor
        self.source = source
        self.cases = cases
        self.recipe = recipe
        self.keep_labels = keep_labels
        self.keep_predictions = keep_predictions and len(cases) <= MOST_PREDICTIONS_KEPT
        self._labels: dict[int, Tensor] = {}
        self._predictions: dict[int, Tensor] = {}

    def run(self, stop: StopRequest, progress: Callable[[int, int], None], within: WithinTold | None = None) -> Scores:
        """Scores all cases; raises Stopped between two cases where a stop was asked for. `within` hears of large cases."""
        began = time.perf_counter()
        scores = []
        self._predictions.clear()
        for index in range(len(self.cases)):
            stop.check()
            judged = self.judge(index, telling(within, index, len(self.cases), self.cases[index].name))
            if self.keep_predictions:
                self._predictions[index] = judged.prediction.cpu()
            scores.append(
                score_case(
                    judged.sample.name,
                    judged.prediction,
                    judged.label,
                    self.recipe.data.class_count,
                    spacing_mm(judged.grid.affine, self.recipe.dimensions),
                    self.recipe.validation.hd95,
                    judged.ignores,
                )
            )
            progress(index + 1, len(self.cases))
        summary = summarise(scores, self.recipe.data.class_names)
        return Scores(summary, tuple(scores), time.perf_counter() - began)

    def judge(self, index: int, told: WindowsTold | None = None) -> Judged:
        """One case with its prediction: what the last `run` kept of it, else predicted by the network as it is."""
        original = self.recipe.validation.grid == "original"
        sample = self.source[index]
        prediction = self._predictions.get(index)
        if prediction is None:
            prediction = self.predictor.class_map(sample, original, told)
        label = self._reference(index, sample, original).to(prediction.device)
        grid = sample.source_grid if original else sample.grid
        return Judged(sample, prediction, label, grid, ignores=self.recipe.data.ignore_label is not None)

    def close(self) -> None:
        """Gives up the cases."""
        self.source.close()

    def _reference(self, index: int, sample: Sample, original: bool) -> Tensor:
        if not original:
            assert sample.label is not None
            return sample.label[0]
        label = self._labels.get(index)
        if label is None:
            array, _ = read_label(self.cases[index], self.recipe.data, self.recipe.dimensions, sample.source_grid)
            label = torch.from_numpy(np.ascontiguousarray(array[0]))
            if self.keep_labels:
                self._labels[index] = label
        return label


def spacing_mm(affine: np.ndarray, dimensions: int) -> tuple[float, ...]:
    """The voxel size along each array axis."""
    return tuple(float(length) for length in np.linalg.norm(affine[:3, :dimensions], axis=0))
