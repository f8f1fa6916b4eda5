"""Owns the full evaluation of a segmentation: measures by case and class, their intervals, and the worst cases with pictures."""

from __future__ import annotations

import contextlib
import csv
import io
import tempfile
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from fasttrain.delivery.evaluate import Part, validator_of
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import WithinTold
from fasttrain.engine.validating.pictures import as_regions, planes_of
from fasttrain.engine.validating.validation import Scores, Validator, spacing_mm
from fasttrain.errors import StorageError
from fasttrain.recipe import Recipe
from fasttrain.samples import Grid
from fasttrain.scoring import CaseScore, ClassMeasure, Interval, bootstrap_intervals, measure_case
from fasttrain.telemetry.pictures import CasePicture, write_picture
from fasttrain.telemetry.strict_json import plain
from fasttrain.whole_files import told_free, write_json, write_whole

COLUMNS = (
    "case",
    "class",
    "dice",
    "hd95_mm",
    "hd95_penalised",
    "surface_dice",
    "volume_ml",
    "predicted_ml",
    "error_ml",
    "error_percent",
)
_ROOM_BYTES = 1 << 18
"""About what a few pictures and the tables take; less is too little to begin with."""


@dataclass(frozen=True)
class Worst:
    """One of the worst cases: its mean Dice, the class that is worst in it, and its picture, where one was drawn."""

    name: str
    dice: float
    worst_class: str
    worst_dice: float
    picture: Path | None


@dataclass(frozen=True)
class Evaluation:
    """measures: {case: one ClassMeasure a class or region}. intervals: {`dice`, `hd95_mm`, `surface_dice`: (of the mean, of each
    class)}.
    """

    scores: Scores
    names: tuple[str, ...]
    measures: dict[str, tuple[ClassMeasure, ...]]
    intervals: dict[str, tuple[Interval | None, tuple[Interval | None, ...]]]
    worst: tuple[Worst, ...]
    tolerance_mm: float | None

    @property
    def cases(self) -> tuple[CaseScore, ...]:
        """The scores case by case."""
        return tuple(score for score in self.scores.cases if isinstance(score, CaseScore))

    def rows(self) -> list[dict[str, Any]]:
        """One record a case and class, with `COLUMNS`; None where nothing counts."""
        records = []
        for score in self.cases:
            for name, one, measure in zip(self.names, score.classes, self.measures[score.name], strict=True):
                values = (one.dice, one.hd95, one.hd95_penalised, measure.surface_dice)
                volumes = (measure.volume_ml, measure.predicted_ml, measure.error_ml, measure.error_percent)
                records.append(dict(zip(COLUMNS, (score.name, name, *values, *volumes), strict=True)))
        return records

    def means(self, column: str) -> dict[str, float | None]:
        """The mean of a column for each class, over the cases that count."""
        rows = self.rows()
        found = {
            name: [row[column] for row in rows if row["class"] == name and row[column] is not None]
            for name in self.names
        }
        return {name: fmean(values) if values else None for name, values in found.items()}


def evaluate_in_full(
    run: TrainedRun,
    part: Part,
    data: Path | None,
    folder: Path,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    tolerance_mm: float,
    surfaces: bool,
    worst: int,
    within: WithinTold | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """As `evaluate`, with all measures; writes `cases.csv` and the pictures of the `worst` cases into `folder`.

    surfaces: whether distances between surfaces are taken, which for large volumes takes longer than predicting them. Raises
    StorageError where the folder cannot be written, before anything is predicted.
    """
    _make(folder)
    measures: dict[str, tuple[ClassMeasure, ...]] = {}
    recipe = run.recipe
    regions = recipe.regions.members if recipe.regions else ()
    tolerance = tolerance_mm if surfaces else None

    def looked_at(name: str, prediction: Tensor, label: Tensor, grid: Grid) -> None:
        ignores, spacing = recipe.data.ignore_label is not None, spacing_mm(grid.affine, recipe.volume_dimensions)
        measures[name] = measure_case(prediction, label, recipe.data.class_count, spacing, tolerance, ignores, regions)

    with validator_of(run, part, data, stop, warn, looked_at, surfaces) as validator, explaining(recipe):
        scores = validator.run(stop, progress, within)
        names = tuple(recipe.data.scored_names)
        cases = [score for score in scores.cases if isinstance(score, CaseScore)]
        drawn = _worst(validator, cases, names, worst, folder, run.epoch, stop)
    evaluation = Evaluation(scores, names, measures, _intervals(cases, measures), drawn, tolerance)
    write_table(evaluation, folder / "cases.csv")
    _drop_former(folder, {one.picture for one in drawn})
    return evaluation


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            # A full disk still makes files, as long as nothing is in them
            stream.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}{told_free(folder)}; name another folder with --out"
        ) from error


def _drop_former(folder: Path, drawn: AbstractSet[Path | None]) -> None:
    """Pictures of a former evaluation are of other weights or cases; they go once there are new ones."""
    for path in (*folder.glob("epoch_*_worst-*.png"), *folder.glob("folds_worst-*.png")):
        if path not in drawn:
            with contextlib.suppress(OSError):
                path.unlink()


def write_table(evaluation: Evaluation, path: Path) -> None:
    """`COLUMNS` as CSV, an empty cell where nothing counts."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in evaluation.rows():
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    with write_whole(path) as stream:
        stream.write(text.getvalue().encode("utf-8", "surrogateescape"))


def write_document(document: dict[str, Any], path: Path) -> None:
    """The evaluation as JSON; non-finite numbers are null."""
    write_json(path, plain(document))


def _intervals(
    cases: Sequence[CaseScore], measures: dict[str, tuple[ClassMeasure, ...]]
) -> dict[str, tuple[Interval | None, tuple[Interval | None, ...]]]:
    columns: dict[str, list[list[float | None]]] = {
        "dice": [[one.dice for one in score.classes] for score in cases],
        "hd95_mm": [[one.hd95 for one in score.classes] for score in cases],
        "surface_dice": [[one.surface_dice for one in measures[score.name]] for score in cases],
    }
    return {name: bootstrap_intervals(values) for name, values in columns.items()}


def _worst(
    validator: Validator,
    cases: Sequence[CaseScore],
    names: tuple[str, ...],
    count: int,
    folder: Path,
    epoch: int | None,
    stop: StopRequest,
) -> tuple[Worst, ...]:
    """The cases with the lowest mean Dice over the classes that count in them, the worst first."""
    counted = [
        (
            index,
            score,
            [(one.dice, name) for one, name in zip(score.classes, names, strict=True) if one.dice is not None],
        )
        for index, score in enumerate(cases)
    ]
    ranked = sorted(
        ((fmean(dice for dice, _ in dices), index, score, min(dices)) for index, score, dices in counted if dices),
        key=lambda one: one[:2],
    )
    found = []
    for place, (mean, index, score, (lowest, name)) in enumerate(ranked[:count], start=1):
        stop.check()
        picture = _picture(validator, index, score, f"worst-{place}", names, folder, epoch)
        found.append(Worst(score.name, mean, name, lowest, picture))
    return tuple(found)


def _picture(
    validator: Validator,
    index: int,
    score: CaseScore,
    role: str,
    names: tuple[str, ...],
    folder: Path,
    epoch: int | None,
) -> Path:
    recipe: Recipe = validator.recipe
    judged = validator.judge(index)
    planes = planes_of(judged if recipe.regions is None else as_regions(judged, recipe.regions))
    dices = tuple(one.dice for one in score.classes)
    return write_picture(CasePicture(score.name, role, epoch, planes, names, dices), folder)
