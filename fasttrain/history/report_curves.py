"""Owns the section of a report with the curves over the epochs: loss, scores, learning rate and speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fasttrain.history.charts import Series, chart
from fasttrain.history.key_figures import score_name
from fasttrain.history.page import paragraph, section
from fasttrain.history.standing import Standing
from fasttrain.recipe.task import TASKS


def curves_section(runs: Sequence[Standing]) -> str:
    """Losses, scores, learning rate and speed over the epochs; of several folds a line each."""
    several = len(runs) > 1
    named = [(f"{run.path.name} " if several else "", run) for run in runs]
    metric = next((run.metric for run in runs if run.metric), None)
    loss = chart("training loss, mean over the epoch", _series(named, {"train_loss": "loss"}))
    drawn = [loss]
    if metric is not None:
        unit = " (Gy, lower is better)" if "dose" in metric else " (0 to 1)"
        columns = {metric: score_name(metric) if several else f"{score_name(metric)}, mean"}
        drawn.append(chart(f"{score_name(metric)} on the validation cases{unit}", _scores(named, metric, columns)))
    for title, prefix in (("HD95 (mm)", "val_hd95"), ("DVH score (Gy, lower is better)", "val_dvh")):
        drawn.append(chart(title, _by_prefix(named, prefix)))
    drawn.append(chart("learning rate", _series(named, {"lr": "learning rate"})))
    drawn.append(chart("patches a second", _series(named, {"patches_per_second": "patches/s"}), from_zero=True))
    shares = {"wait_share": "waiting for data", "gpu_util": "GPU busy"}
    drawn.append(chart("share of the time (0 to 1)", _series(named, shares), from_zero=True))
    drawn.append(chart("GPU memory (GiB)", _series(named, {"gpu_gib": "GPU memory"}), from_zero=True))
    inside = "".join(drawn)
    return section(
        "Curves", f'<div class="charts">{inside}</div>' if inside else paragraph("No epoch was closed.", "note")
    )


def _series(named: Iterable[tuple[str, Standing]], columns: Mapping[str, str]) -> list[Series]:
    """Of each run the columns, by the names that they are to have."""
    return [
        Series(f"{prefix}{name}", _points(run, column), wide=len(columns) == 1)
        for prefix, run in named
        for column, name in columns.items()
    ]


def _scores(named: Sequence[tuple[str, Standing]], metric: str, columns: dict[str, str]) -> list[Series]:
    """The headline, and of a single run its classes too."""
    mean = _series(named, columns)
    if len(named) > 1 or metric != f"val_{TASKS['segmentation'].metric}":
        return mean
    return [*mean, *_by_class(named[0][1], f"{metric}_")]


def _by_prefix(named: Sequence[tuple[str, Standing]], prefix: str) -> list[Series]:
    rows = named[0][1].rows if named else []
    mean = next((column for column in rows[0] if column in (prefix, f"{prefix}_score")), None) if rows else None
    if mean is None:
        return []
    lines = _series(named, {mean: "mean"})
    return lines if len(named) > 1 else [*lines, *_by_class(named[0][1], f"{prefix}_", mean)]


def _by_class(run: Standing, prefix: str, without: str = "") -> list[Series]:
    columns = [
        column for column in (run.rows[0] if run.rows else ()) if column.startswith(prefix) and column != without
    ]
    return [Series(column.removeprefix(prefix), _points(run, column)) for column in columns]


def _points(run: Standing, column: str) -> list[tuple[float, float]]:
    return [(row["epoch"] or 0.0, value) for row in run.rows if (value := row.get(column)) is not None]
