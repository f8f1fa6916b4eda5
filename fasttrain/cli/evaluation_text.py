"""Owns how an evaluation is shown: as a document, and as tables."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from fasttrain.cli.figures import score_text
from fasttrain.cli.printing import print_table
from fasttrain.scoring.bootstrap import METHOD
from fasttrain.telemetry.strict_json import plain
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.delivery.evaluation import Evaluation
    from fasttrain.scoring import Interval


def evaluation_document(found: Evaluation) -> dict[str, Any]:
    """Everything, as plain values."""
    summary: Any = found.scores.summary
    cases: dict[str, dict[str, Any]] = {}
    for row in found.rows():
        cases.setdefault(row["case"], {})[row["class"]] = {key: row[key] for key in list(row)[2:]}
    for score in found.cases:
        for name, one in zip(found.names, score.classes, strict=True):
            if one.slice_dices:
                cases[score.name][name]["slice_dice"] = fmean(one.slice_dices)
    document: Any = plain(
        {
            "dice": summary.dice,
            "dice_by_class": summary.dice_by_class,
            "dice_counts": summary.dice_counts,
            "background_dice": summary.background_dice,
            "hd95_mm": summary.hd95,
            "hd95_mm_by_class": summary.hd95_by_class,
            "hd95_penalised": summary.hd95_penalised,
            "surface_dice_tolerance_mm": found.tolerance_mm,
            "surface_dice_by_class": found.means("surface_dice"),
            "error_ml_by_class": found.means("error_ml"),
            "error_percent_by_class": found.means("error_percent"),
            "slice_dice": summary.slice_dice,
            "slice_dice_by_class": summary.slice_dice_by_class,
            "slice_counts": summary.slice_counts,
            "intervals": {"method": METHOD, **{name: _both(found, *both) for name, both in found.intervals.items()}},
            "worst": [vars(one) for one in found.worst],
            "cases": cases,
        }
    )
    assert isinstance(document, dict)
    return document


def print_evaluation(found: Evaluation) -> None:
    """Dice by case and class, the means of all measures with their intervals, and the worst cases."""
    summary: Any = found.scores.summary
    rows = [("case", *found.names)]
    rows += [(score.name, *(score_text(one.dice, 4) for one in score.classes)) for score in found.cases]
    rows.append(("mean", *(score_text(summary.dice_by_class[name], 4) for name in found.names)))
    rows.append(("counted", *(str(summary.dice_counts[name]) for name in found.names)))
    if summary.slice_counts:
        rows.append(("mean of slices", *(score_text(summary.slice_dice_by_class[name], 4) for name in found.names)))
        rows.append(("counted slices", *(str(summary.slice_counts[name]) for name in found.names)))
    print_table(rows)
    _print_measures(found)
    if found.worst:
        print("worst cases")
        worst = [("case", "dice", "worst in", "dice", "picture")]
        worst += [
            (one.name, f"{one.dice:.4f}", one.worst_class, f"{one.worst_dice:.4f}", str(one.picture or "–"))
            for one in found.worst
        ]
        print_table(worst, indent="  ")
    volumes = f" over {counted(summary.cases, 'case')}"
    slices = f", of single slices {score_text(summary.slice_dice, 4)}" if summary.slice_counts else ""
    print(f"mean Dice {score_text(summary.dice, 4)}{_text(found.intervals['dice'][0], 4)}{volumes}{slices}")
    if summary.hd95 is not None:
        penalised = sum(summary.hd95_penalised.values())
        interval = _text(found.intervals["hd95_mm"][0], 2)
        print(f"mean HD95 {summary.hd95:.2f} mm{interval}, {counted(penalised, 'structure')} missed or invented")


def _print_measures(found: Evaluation) -> None:
    """A row a class: means with their intervals."""
    summary: Any = found.scores.summary
    surface, error, percent = (found.means(column) for column in ("surface_dice", "error_ml", "error_percent"))
    tolerance = "" if found.tolerance_mm is None else f" at {found.tolerance_mm:g} mm"
    rows = [("class", "Dice", "HD95 mm", f"surface Dice{tolerance}", "volume error ml", "%")]
    for place, name in enumerate(found.names):
        between = {measure: both[1][place] for measure, both in found.intervals.items()}
        rows.append(
            (
                name,
                score_text(summary.dice_by_class[name], 4) + _text(between["dice"], 4),
                score_text(summary.hd95_by_class[name], 2) + _text(between["hd95_mm"], 2),
                score_text(surface[name], 4) + _text(between["surface_dice"], 4),
                _signed(error[name], 3),
                _signed(percent[name], 1),
            )
        )
    print(f"means, and where they lie ({METHOD})")
    print_table(rows, indent="  ")


def _text(interval: Interval | None, digits: int) -> str:
    return "" if interval is None else f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _signed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:+.{digits}f}"


def _both(found: Evaluation, headline: Interval | None, by_class: tuple[Interval | None, ...]) -> dict[str, Any]:
    ends = [None if one is None else [one.low, one.high] for one in (headline, *by_class)]
    return {"mean": ends[0], "by_class": dict(zip(found.names, ends[1:], strict=True))}
