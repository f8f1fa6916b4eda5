"""Owns the pictures drawn from `metrics.csv`: the training loss and the Dice of each class over the epochs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.errors import StorageError
from fasttrain.telemetry.figure_file import save_figure
from fasttrain.telemetry.metrics_csv import Row, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DICE = "val_dice_"
_LEGEND_CLASSES = 20
"""More classes than this are drawn but not named: a legend that covers the plot helps nobody."""


def write_plots(metrics_csv: Path, folder: Path) -> list[Path]:
    """Draws `loss.png` and `dice.png` (or, of doses, `dose.png`) into `folder` and returns the files written.

    Without rows none are, without scores no `dice.png`. Raises StorageError where a picture cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}; choose another folder with --run") from error
    rows = read_metrics(metrics_csv)
    written: list[Path] = []
    if _points(rows, "train_loss")[0]:
        written.append(save_figure(_draw_loss(rows), folder / "loss.png"))
    if _points(rows, "val_dice")[0]:
        written.append(save_figure(_draw_dice(rows), folder / "dice.png"))
    if _points(rows, "val_dose_score")[0]:
        written.append(save_figure(_draw_dose(rows), folder / "dose.png"))
    return written


def _draw_dose(rows: list[Row]) -> Figure:
    figure, axes = _new_axes("Error of the dose on the validation cases (Gy)")
    for name, label, colour in (("val_dose_score", "dose score", "black"), ("val_dvh_score", "DVH score", "C0")):
        epochs, scores = _points(rows, name)
        axes.plot(epochs, scores, linewidth=2.0, marker="o", markersize=3.5, color=colour, label=label)
    epochs, scores = _points(rows, "val_dose_score")
    best = min(range(len(scores)), key=scores.__getitem__)
    axes.set_title(f"best dose score {scores[best]:.3f} Gy in epoch {epochs[best]:.0f}", fontsize=10)
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8, loc="upper right", framealpha=0.8)
    _set_epochs(axes, rows)
    return figure


def _draw_loss(rows: list[Row]) -> Figure:
    figure, axes = _new_axes("Training loss (mean over the epoch)")
    epochs, losses = _points(rows, "train_loss")
    axes.plot(epochs, losses, linewidth=2.0, marker="." if len(epochs) < 50 else "", color="C0")
    _set_epochs(axes, rows)
    return figure


def _draw_dice(rows: list[Row]) -> Figure:
    figure, axes = _new_axes("Dice on the validation cases (0 to 1)")
    classes = [name for name in rows[0] if name.startswith(_DICE)]
    for index, name in enumerate(classes):
        epochs, scores = _points(rows, name)
        label = name.removeprefix(_DICE) if len(classes) <= _LEGEND_CLASSES else None
        # A class may have been counted in a single epoch: without a marker that point would not show.
        axes.plot(epochs, scores, linewidth=0.9, marker=".", markersize=3, color=f"C{(index + 1) % 10}", label=label)
    epochs, scores = _points(rows, "val_dice")
    axes.plot(epochs, scores, linewidth=2.5, marker="o", markersize=3.5, color="black", label="mean")
    best = max(range(len(scores)), key=scores.__getitem__)
    axes.set_title(f"best mean {scores[best]:.4f} in epoch {epochs[best]:.0f}", fontsize=10)
    everything = [score for name in ("val_dice", *classes) for score in _points(rows, name)[1]]
    axes.set_ylim(max(min(everything) - 0.05, -0.01), min(max(everything) + 0.05, 1.01))
    axes.legend(fontsize=8, loc="lower right", framealpha=0.8, ncols=1 if len(classes) < 8 else 2)
    _set_epochs(axes, rows)
    return figure


def _new_axes(label: str) -> tuple[Figure, Axes]:
    """A figure of its own with one pair of axes: pyplot would keep it in global state and choose a backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    return figure, axes


def _set_epochs(axes: Axes, rows: list[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in rows if row["epoch"] is not None]
    steps = [row["step"] for row in rows if row["step"] is not None]
    axes.set_xlabel(f"epoch ({max(steps):.0f} optimiser steps in all)" if steps else "epoch")
    axes.set_xlim(min(epochs, default=1) - 0.5, max(epochs, default=1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))


def _points(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    """Epochs and values of a column where both are finite numbers."""
    pairs = [(row["epoch"], row.get(name)) for row in rows]
    found = [
        (epoch, value) for epoch, value in pairs if epoch is not None and value is not None and math.isfinite(value)
    ]
    return [epoch for epoch, _ in found], [value for _, value in found]
