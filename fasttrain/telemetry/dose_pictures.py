"""Owns the picture of one predicted dose: slices of reference, prediction and difference over the CT, and the DVH of each
structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasttrain.telemetry.figure_file import save_figure
from fasttrain.telemetry.pictures import Plane, class_colours, grey_window, picture_place, upright

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_SHARE = 0.05
"""Of the highest dose: what is below shows the CT alone."""


@dataclass(frozen=True, eq=False)
class DosePlane:
    """One slice: `plane.label` and `plane.prediction` are doses in Gy, [a, b]; `targets` bool [a, b] lies inside a target."""

    plane: Plane
    targets: np.ndarray
    possible: np.ndarray


@dataclass(frozen=True, eq=False)
class Curve:
    """The dose-volume histogram of a structure: percent of it that gets at least each dose, [k], in reference and prediction."""

    structure: str
    reference: np.ndarray
    prediction: np.ndarray


@dataclass(frozen=True, eq=False)
class DosePicture:
    """What is shown of a case; `doses` [k] in Gy are those of the curves, the scores are in Gy."""

    case: str
    role: str
    epoch: int
    planes: tuple[DosePlane, ...]
    curves: tuple[Curve, ...]
    doses: np.ndarray
    dose_score: float
    dvh_score: float | None


def write_dose_picture(picture: DosePicture, folder: Path) -> Path:
    """Draws `picture` into `folder` as `epoch_0010_worst_CASE.png`; raises StorageError where it cannot be written."""
    return save_figure(draw_dose(picture), picture_place(folder, picture.epoch, picture.role, picture.case))


def draw_dose(picture: DosePicture) -> Figure:
    """A row of three slices a plane, and the DVH below them."""
    from matplotlib.figure import Figure

    rows = len(picture.planes)
    figure = Figure(figsize=(11.0, 3.4 * rows + 4.2), dpi=100, layout="constrained")
    grid = figure.add_gridspec(rows + 1, 3, height_ratios=[*[3.4] * rows, 4.0])
    highest = max(float(max(one.plane.label.max(), one.plane.prediction.max())) for one in picture.planes) or 1.0
    window = grey_window([one.plane for one in picture.planes])
    for row, one in enumerate(picture.planes):
        axes = [figure.add_subplot(grid[row, column]) for column in range(3)]
        _draw_plane(figure, axes, one, highest, window)
    _draw_curves(figure.add_subplot(grid[rows, :]), picture)
    dvh = "–" if picture.dvh_score is None else f"{picture.dvh_score:.2f} Gy"
    of = f"{picture.case}: {picture.role} case of epoch {picture.epoch}"
    title = f"{of}, dose score {picture.dose_score:.2f} Gy, DVH score {dvh}"
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def _draw_plane(figure: Figure, axes: list[Axes], one: DosePlane, highest: float, window: tuple[float, float]) -> None:
    plane = upright(one.plane)
    other = upright(
        Plane(one.plane.image, one.targets, one.possible, one.plane.spacing_mm, one.plane.toward)  # moved the same way
    )
    width, height = (n * mm for n, mm in zip(plane.image.shape, plane.spacing_mm, strict=True))
    place = {"origin": "lower", "extent": (0.0, width, 0.0, height), "interpolation": "nearest"}
    reference, prediction = (np.where(other.prediction, dose, 0.0) for dose in (plane.label, plane.prediction))
    error = np.where(other.prediction, plane.prediction - plane.label, np.nan)
    most = max(float(np.nanmax(np.abs(error), initial=0.0)), 1.0)
    shown = (("reference", reference), ("prediction", prediction))
    for axis, (name, dose) in zip(axes[:2], shown, strict=True):
        axis.imshow(plane.image.T, cmap="gray", vmin=window[0], vmax=window[1], **place)  # type: ignore[arg-type]
        seen = np.ma.masked_less(dose, _LEAST_SHARE * highest)
        drawn = axis.imshow(seen.T, cmap="jet", vmin=0.0, vmax=highest, alpha=0.6, **place)  # type: ignore[arg-type]
        axis.set_title(name, fontsize=9)
    figure.colorbar(drawn, ax=axes[:2], label="Gy", shrink=0.85)
    axes[2].imshow(plane.image.T, cmap="gray", vmin=window[0], vmax=window[1], **place)  # type: ignore[arg-type]
    apart = axes[2].imshow(error.T, cmap="coolwarm", vmin=-most, vmax=most, alpha=0.7, **place)  # type: ignore[arg-type]
    axes[2].set_title("prediction − reference", fontsize=9)
    figure.colorbar(apart, ax=axes[2], label="Gy", shrink=0.85)
    for axis in axes:
        if other.label.any():
            a, b = ((np.arange(n) + 0.5) * mm for n, mm in zip(plane.image.shape, plane.spacing_mm, strict=True))
            axis.contour(a, b, other.label.T.astype(np.float32), levels=[0.5], colors=["white"], linewidths=0.9)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_xlabel(f"→ {plane.toward[0]}", fontsize=8)
        axis.set_ylabel(f"→ {plane.toward[1]}", fontsize=8)


def _draw_curves(axes: Axes, picture: DosePicture) -> None:
    for curve, colour in zip(picture.curves, class_colours(max(len(picture.curves), 1)), strict=False):
        axes.plot(picture.doses, curve.reference, color=colour, linewidth=1.5, label=curve.structure)
        axes.plot(picture.doses, curve.prediction, color=colour, linewidth=1.5, linestyle="dashed")
    axes.set_xlabel("dose in Gy (solid: reference, dashed: prediction)")
    axes.set_ylabel("% of the structure that gets it")
    axes.set_xlim(0.0, float(picture.doses[-1]))
    axes.set_ylim(0.0, 101.0)
    axes.grid(True, alpha=0.3)
    if picture.curves:
        axes.legend(fontsize=8, ncols=2, loc="lower left")
