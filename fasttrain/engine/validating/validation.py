"""Owns the scoring of whole validation volumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttrain.data.grids import index_map
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating.inference import Inference, WindowsTold, WithinTold, sent, telling
from fasttrain.engine.validating.validation_cases import ValidationCase, ValidationCases
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.ranges import part
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource, Grid, Sample
from fasttrain.scoring import (
    CaseScore,
    DoseScore,
    DoseSummary,
    ScoreSummary,
    count_case,
    count_slices,
    score_case,
    score_counts,
    score_dose,
    summarise,
    summarise_doses,
    with_slices,
)
from fasttrain.telemetry.events import ValidationFigures
from fasttrain.windows import Told


@dataclass(frozen=True)
class Scores:
    """The scores of one validation: in all, case by case, and how long it took."""

    summary: ScoreSummary | DoseSummary
    cases: tuple[CaseScore, ...] | tuple[DoseScore, ...]
    seconds: float

    def figures(self) -> ValidationFigures:
        """What is told of the validation."""
        summary = self.summary
        if isinstance(summary, DoseSummary):
            return ValidationFigures(
                dice=None,
                dice_by_class={},
                dice_counts={},
                dose_score=summary.dose_score,
                dvh_score=summary.dvh_score,
                dvh_by_structure=summary.dvh_by_structure,
                seconds=self.seconds,
                cases=summary.cases,
            )
        return ValidationFigures(
            dice=summary.dice,
            dice_by_class=summary.dice_by_class,
            dice_counts=summary.dice_counts,
            hd95=summary.hd95,
            hd95_by_class=summary.hd95_by_class,
            hd95_penalised=summary.hd95_penalised,
            slice_dice=summary.slice_dice,
            slice_dice_by_class=summary.slice_dice_by_class,
            seconds=self.seconds,
            cases=summary.cases,
        )

    def by_case(self, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
        """Dice a class or region of each case by `names`, or its dose score, its DVH score and the mean DVH error of each of its
        structures.
        """
        records: dict[str, dict[str, float | None]] = {}
        for score in self.cases:
            if isinstance(score, DoseScore):
                means = {structure: fmean(errors) for structure, errors in score.errors.items()}
                records[score.name] = {"dose_score": score.dose_score, "dvh_score": score.dvh_score, **means}
            else:
                dices = (one.dice for one in score.classes)
                records[score.name] = dict(zip(names, dices, strict=True))
        return records


LookedAt = Callable[[str, Tensor, Tensor, Grid], None]
"""Given a case's name, its prediction and what it was scored against, both [*spatial], and their grid."""
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


@dataclass(frozen=True, eq=False)
class JudgedDose:
    """A case as its dose is scored: Gy and the bits of the structures, [*spatial] in the host's memory, on `grid`."""

    sample: Sample
    prediction: np.ndarray
    reference: np.ndarray
    bits: np.ndarray
    grid: Grid


class Validator:
    """Predicts and scores every validation case.

    Against the grid of the file the label is the file's own, kept as uint8 where `keep_labels` says that the cases are kept in
    memory anyway. `keep_predictions`: cases are asked for by `judge` after they were scored. `looked_at` is given each case
    after it was scored. Of several `ranks` each scores the cases that are dealt to it, and all know all scores.
    """

    def __init__(
        self,
        predictor: Inference,
        source: CaseSource,
        cases: Sequence[Case],
        recipe: Recipe,
        keep_labels: bool,
        keep_predictions: bool = False,
        looked_at: LookedAt | None = None,
        ranks: Ranks = ONLY_ONE,
    ) -> None:
        self.ranks = ranks
        self.predictor = predictor
        self.source = source
        self.cases = cases
        self.recipe = recipe
        self.kept = ValidationCases(source, cases, recipe, predictor.device, keep_labels)
        self.keep_predictions = keep_predictions and len(cases) <= MOST_PREDICTIONS_KEPT
        self._looked_at = looked_at
        self._predictions: dict[int, Tensor] = {}

    def run(self, stop: StopRequest, progress: Callable[[int, int], None], within: WithinTold | None = None) -> Scores:
        """Scores all cases; raises Stopped between two batches of windows where a stop was asked for, of any rank. `within` hears
        of large cases.

        On a GPU cases are told when they were handed over: but for HD95 nothing is read back before the last one.
        """
        began = time.perf_counter()
        own: dict[int, Any] | None = None
        with part("validation"):
            try:
                own = self._run(stop, progress, within)
            except Stopped:
                if self.ranks.place.alone:
                    raise
        found = self.ranks.gather(own)
        if any(one is None for one in found):
            raise Stopped
        by_index = {index: score for one in found for index, score in one.items()}
        scores = tuple(by_index[index] for index in range(len(self.cases)))
        return Scores(self._summary(scores), scores, time.perf_counter() - began)

    def _summary(self, scores: Sequence[Any]) -> ScoreSummary | DoseSummary:
        data = self.recipe.data
        if self.recipe.task == "dose":
            return summarise_doses(scores, data.class_names)
        return summarise(scores, data.scored_names)

    def _run(
        self, stop: StopRequest, progress: Callable[[int, int], None], within: WithinTold | None
    ) -> dict[int, Any]:
        """The scores of this rank's cases."""
        self._predictions.clear()
        dose = self.recipe.task == "dose"
        sheet: Any = _DoseSheet(self.recipe) if dose else _ScoreSheet(self.recipe)
        own = self.ranks.place.share_of(range(len(self.cases)))
        told = self._telling(stop, within, own)
        predicted = self.predictor.dose_maps if dose else self.predictor.class_maps
        maps = predicted(_Dealt(self.kept, own), self._original, told, self.kept.let_go)
        for number, prediction in maps:
            stop.check()
            index = own[number]
            case = self.kept.finished(index)
            if self.keep_predictions:
                self._predictions[index] = prediction.cpu()
            reference = case.reference if dose else sent(case.reference, prediction.device)
            sheet.add(case, prediction, reference, self.kept.scored_grid(case))
            if self._looked_at is not None:
                self._looked_at(case.name, prediction, reference, self.kept.scored_grid(case))
            progress(number + 1, len(own))
        return dict(zip(own, sheet.scores(), strict=True))

    def judge(self, index: int, told: WindowsTold | None = None) -> Judged:
        """One case with its prediction: what the last `run` kept of it, else predicted by the network as it is."""
        sample = self.source[index]
        prediction = self._predictions.get(index)
        if prediction is None:
            prediction = self.predictor.class_map(sample, self._original, told)
        label = self.kept.reference(index, sample).to(prediction.device)
        grid = self.kept.scored_grid(sample)
        return Judged(sample, prediction, label, grid, ignores=self.recipe.data.ignore_label is not None)

    def judge_dose(self, index: int) -> JudgedDose:
        """As `judge`, for a dose."""
        sample = self.source[index]
        prediction = self._predictions.get(index)
        if prediction is None:
            prediction = self.predictor.dose_map(sample, self._original)
        reference = self.kept.reference(index, sample)
        bits = reference[1].to(torch.int16).numpy()
        grid = self.kept.scored_grid(sample)
        return JudgedDose(sample, prediction.cpu().numpy(), reference[0].numpy(), bits, grid)

    def close(self) -> None:
        """Gives up the cases."""
        self.kept.close()

    @property
    def _original(self) -> bool:
        return self.recipe.validation.grid == "original"

    def _telling(self, stop: StopRequest, within: WithinTold | None, own: Sequence[int]) -> Callable[[Told], None]:
        tellers: dict[int, WindowsTold | None] = {}

        def told(batch: Told) -> None:
            stop.check()
            if batch.index not in tellers:
                tellers[batch.index] = telling(within, batch.index, len(own), self.cases[own[batch.index]].name)
            teller = tellers[batch.index]
            if teller is not None:
                teller(batch.windows, batch.total)

        return told


class _Dealt:
    """Those of the cases that a rank predicts, by their number among these."""

    def __init__(self, cases: ValidationCases, own: Sequence[int]) -> None:
        self._cases = cases
        self._own = own

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, number: int) -> ValidationCase:
        return self._cases[self._own[number]]


class _ScoreSheet:
    """The scores of cases that come one after another; a GPU's counts are read together at the end, unless HD95 needs volumes."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._regions = recipe.regions.members if recipe.regions else ()
        self._names: list[str] = []
        self._counts: list[Tensor] = []
        self._scores: list[CaseScore] = []
        self._slices: list[Tensor] = []

    def add(self, case: ValidationCase, prediction: Tensor, reference: Tensor, grid: Grid) -> None:
        data, name = self.recipe.data, case.name
        ignores = data.ignore_label is not None
        if data.slices is not None:
            axis = axis_across(case.grid, grid)
            self._slices.append(count_slices(prediction, reference, axis, data.class_count, ignores, self._regions))
        if self.recipe.validation.hd95:
            spacing = spacing_mm(grid.affine, self.recipe.volume_dimensions)
            self._scores.append(
                score_case(name, prediction, reference, data.class_count, spacing, True, ignores, self._regions)
            )
            return
        self._names.append(name)
        self._counts.append(count_case(prediction, reference, data.class_count, ignores, self._regions))

    def scores(self) -> tuple[CaseScore, ...]:
        """Waits for the device."""
        if not self._slices:
            return self._volume_scores()
        return tuple(
            with_slices(score, counts.tolist())
            for score, counts in zip(self._volume_scores(), self._slices, strict=True)
        )

    def _volume_scores(self) -> tuple[CaseScore, ...]:
        if not self._counts:
            return tuple(self._scores)
        # The last ones lie on the CPU where a GPU's memory ran out on the way
        device = self._counts[-1].device
        counts = torch.stack([one.to(device) for one in self._counts]).tolist()
        return tuple(score_counts(name, one) for name, one in zip(self._names, counts, strict=True))


class _DoseSheet:
    """The scores of doses, which are taken in the host's memory: percentiles of a few structures, by NumPy as the challenge
    does.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._names = recipe.data.class_names
        self._scores: list[DoseScore] = []

    def add(self, case: ValidationCase, prediction: Tensor, reference: Tensor, grid: Grid) -> None:
        dose, bits = reference.cpu().numpy()
        self._scores.append(
            score_dose(
                case.name,
                prediction.cpu().numpy(),
                dose,
                bits.astype(np.int16),
                self._names,
                spacing_mm(grid.affine, 3),
            )
        )

    def scores(self) -> tuple[DoseScore, ...]:
        return tuple(self._scores)


def axis_across(sliced: Grid, scored: Grid) -> int:
    """The axis of the grid that is scored that runs across the slices, which are the first axis of `sliced`."""
    return int(np.abs(index_map(scored, sliced)[0, :3]).argmax())


def spacing_mm(affine: np.ndarray, dimensions: int) -> tuple[float, ...]:
    """The voxel size along each array axis."""
    return tuple(float(length) for length in np.linalg.norm(affine[:3, :dimensions], axis=0))
