"""Owns the picture of one validated case: grey planes with the label's outlines and the prediction laid over them."""

from __future__ import annotations

import colorsys
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain.errors import StorageError
from fasttrain.telemetry.figure_file import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

_FILE = re.compile(r"^epoch_(\d+)_.*\.png$")
_WORLD = {"R": 0, "L": 0, "A": 1, "P": 1, "S": 2, "I": 2}
_OPPOSITE = {"R": "L", "L": "R", "A": "P", "P": "A", "S": "I", "I": "S"}
_NAMES = {(0, 1): "axial", (0, 2): "coronal", (1, 2): "sagittal"}
# Radiologists' order: the patient's right, or front, on the left of the picture; front, or head, at its top
_RIGHTWARDS = {0: "L", 1: "P"}
_UPWARDS = {1: "A", 2: "S"}

_BRIGHT = "ff3b30 34c759 0a84ff ffd60a ff2dd4 00e5ff ff9500 b388ff"
_TONES = ((0.4, 1.0), (1.0, 1.0), (1.0, 0.6), (0.65, 0.8))
_VEIL = (0.55, 0.55, 0.55, 0.6)
"""Over ignored pixels; grey is no class's colour."""
_LEGEND_CLASSES = 24
_NAME_BYTES = 120


@dataclass(frozen=True, eq=False)
class Plane:
    """One slice of a case: `image` [a, b] float, `label` and `prediction` [a, b] uint8 class indices.

    `spacing_mm` is the pixel size along a and b; `toward` the side of the patient, one of R L A P S I, to which the index
    of a and of b grows. `ignored` [a, b] bool: pixels that are not judged, whatever `label` says there.
    """

    image: np.ndarray
    label: np.ndarray
    prediction: np.ndarray
    spacing_mm: tuple[float, float]
    toward: tuple[str, str]
    ignored: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class CasePicture:
    """What is shown of a case: its planes, the foreground classes in order of their index, and the Dice of each.

    epoch: of the weights; None where the networks of several folds answered.
    """

    case: str
    role: str
    epoch: int | None
    planes: tuple[Plane, ...]
    class_names: tuple[str, ...]
    dice: tuple[float | None, ...]


def write_picture(picture: CasePicture, folder: Path) -> Path:
    """Draws `picture` into `folder` as `epoch_0010_worst_CASE.png`, or `folds_worst_CASE.png` where networks of several folds
    answered; raises StorageError where it cannot be written."""
    return save_figure(draw_case(picture), picture_place(folder, picture.epoch, picture.role, picture.case))


def picture_place(folder: Path, epoch: int | None, role: str, case: str) -> Path:
    """Where a case's picture goes in `folder`, which is made; raises StorageError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}; choose another folder with --run") from error
    # As this process's file system takes the name, whatever the locale
    return folder / os.fsdecode(picture_name(epoch, role, case).encode("utf-8"))


def picture_name(epoch: int | None, role: str, case: str) -> str:
    """The file of a case's picture: what no file name can hold in the case's name is replaced, and its length bounded."""
    plain = re.sub(r"[^\w.-]+", "_", case).encode()[:_NAME_BYTES].decode(errors="ignore")
    return f"{'folds' if epoch is None else f'epoch_{epoch:04d}'}_{role}_{plain}.png"


def drop_pictures(folder: Path, first_epoch: int, last_epoch: int | None = None) -> int:
    """Removes the pictures of epochs from `first_epoch` to `last_epoch` (None: no bound), as far as it may; returns how
    many went.
    """
    dropped = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _FILE.match(path.name)
        if match and first_epoch <= int(match[1]) and (last_epoch is None or int(match[1]) <= last_epoch):
            # No picture is worth a run: one that stays is overwritten, or names an epoch that is taken again
            with contextlib.suppress(OSError):
                path.unlink()
                dropped += 1
    return dropped


def class_colours(count: int) -> list[Colour]:
    """RGB of class 1 on, no two alike (up to 150) and none grey: eight by hand, then ever the one farthest from all before."""
    chosen: list[Colour] = [
        (int(code[:2], 16) / 255, int(code[2:4], 16) / 255, int(code[4:], 16) / 255) for code in _BRIGHT.split()
    ]
    if count > len(chosen):
        candidates = np.array([colorsys.hsv_to_rgb(n / 48, *tone) for tone in _TONES for n in range(48)])
        nearest = np.min([np.linalg.norm(candidates - colour, axis=1) for colour in chosen], axis=0)
        while len(chosen) < count:
            farthest = candidates[int(nearest.argmax())]
            chosen.append((float(farthest[0]), float(farthest[1]), float(farthest[2])))
            nearest = np.minimum(nearest, np.linalg.norm(candidates - farthest, axis=1))
    return chosen[:count]


def grey_window(planes: Sequence[Plane]) -> tuple[float, float]:
    """The values shown as black and as white: the 0.5th and 99.5th percentile, one window for all planes of a case.

    The lowest value is not counted where there are others: around a cropped volume it is only what was filled in.
    """
    values = np.concatenate([np.asarray(plane.image, dtype=np.float32).ravel() for plane in planes])
    values = values[np.isfinite(values)]
    if values.size and (inside := values[values > values.min()]).size:
        values = inside
    low, high = (float(value) for value in np.percentile(values, [0.5, 99.5])) if values.size else (0.0, 1.0)
    return (low, high) if high > low else (low, low + 1.0)


def upright(plane: Plane) -> Plane:
    """The same plane as it is shown: `a` runs to the right (towards L or P), `b` upwards (towards A or S)."""
    arrays = [plane.image, plane.label, plane.prediction, *([] if plane.ignored is None else [plane.ignored])]
    spacing, toward = plane.spacing_mm, plane.toward
    if _WORLD[toward[0]] > _WORLD[toward[1]]:
        arrays = [array.T for array in arrays]
        spacing, toward = spacing[::-1], toward[::-1]
    wanted = _RIGHTWARDS[_WORLD[toward[0]]], _UPWARDS[_WORLD[toward[1]]]
    flips = tuple(axis for axis in (0, 1) if toward[axis] != wanted[axis])
    image, label, prediction, *ignored = (np.flip(array, flips) for array in arrays)
    return Plane(image, label, prediction, spacing, wanted, ignored[0] if ignored else None)


def draw_case(picture: CasePicture) -> Figure:
    """A figure with the planes side by side in one scale, their sides named, and a legend with the Dice of each class."""
    from matplotlib.figure import Figure

    planes = [upright(plane) for plane in picture.planes]
    widths = [plane.image.shape[0] * plane.spacing_mm[0] for plane in planes]
    heights = [plane.image.shape[1] * plane.spacing_mm[1] for plane in planes]
    shown = _classes_shown(picture)
    columns = 4 if len(planes) > 1 else 2
    rows = -(-(min(len(shown), _LEGEND_CLASSES) + 2 + _hides(picture)) // columns)
    width = 12.0 if len(planes) > 1 else 6.0
    # A slice of a single voxel row is still seen, and a column of them does not make a picture yards high
    ratios = [max(one, 0.05 * max(widths)) for one in widths]
    height = min(max(max(heights) * width / sum(ratios), 2.0), 9.0)
    figure = Figure(figsize=(width, height + 0.8 + 0.22 * rows), dpi=110, layout="constrained")
    grid = figure.add_gridspec(1, len(planes), width_ratios=ratios)
    colours, window = class_colours(len(picture.class_names)), grey_window(planes)
    for column, plane in enumerate(planes):
        _draw_plane(figure.add_subplot(grid[0, column]), plane, window, colours)
    figure.suptitle(_title(picture), fontsize=11, parse_math=False)
    _add_legend(figure, picture, shown, colours, columns)
    return figure


def _draw_plane(axes: Axes, plane: Plane, window: tuple[float, float], colours: Sequence[Colour]) -> None:
    width, height = (n * mm for n, mm in zip(plane.image.shape, plane.spacing_mm, strict=True))
    place: dict[str, Any] = {"origin": "lower", "extent": (0.0, width, 0.0, height), "interpolation": "nearest"}
    axes.imshow(plane.image.T, cmap="gray", vmin=window[0], vmax=window[1], **place)
    tints = np.array([(0.0, 0.0, 0.0, 0.0), *((*colour, 0.3) for colour in colours)])
    axes.imshow(tints[plane.prediction.T], **place)
    hidden = np.zeros(plane.label.shape, dtype=bool) if plane.ignored is None else plane.ignored
    if hidden.any():
        axes.imshow(np.where(hidden.T[..., None], _VEIL, 0.0), **place)
    for index, colour in enumerate(colours, start=1):
        _outline(axes, plane.prediction == index, plane.spacing_mm, colour, "dashed")
        _outline(axes, (plane.label == index) & ~hidden, plane.spacing_mm, colour, "solid")
    axes.set_xlim(0.0, width)
    axes.set_ylim(0.0, height)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    across, up = plane.toward
    axes.set_title(_NAMES[_WORLD[across], _WORLD[up]], fontsize=9)
    _name_sides(axes, left=_OPPOSITE[across], right=across, bottom=_OPPOSITE[up], top=up)


def _outline(axes: Axes, mask: np.ndarray, spacing_mm: tuple[float, float], colour: Colour, style: str) -> None:
    if not mask.any():
        return
    # A rim of zeros closes the outline of what reaches the edge
    rimmed = np.pad(mask.astype(np.float32), 1)
    a, b = ((np.arange(n) - 0.5) * mm for n, mm in zip(rimmed.shape, spacing_mm, strict=True))
    axes.contour(a, b, rimmed.T, levels=[0.5], colors=[colour], linewidths=1.3, linestyles=style)


def _name_sides(axes: Axes, **letters: str) -> None:
    from matplotlib.patheffects import withStroke

    places = {"left": (0.02, 0.5), "right": (0.98, 0.5), "bottom": (0.5, 0.02), "top": (0.5, 0.98)}
    for side, letter in letters.items():
        horizontal = side if side in ("left", "right") else "center"
        vertical = side if side in ("bottom", "top") else "center"
        axes.text(
            *places[side],
            letter,
            transform=axes.transAxes,
            ha=horizontal,
            va=vertical,
            color="white",
            fontsize=9,
            path_effects=[withStroke(linewidth=2, foreground="black")],
        )


def _classes_shown(picture: CasePicture) -> list[int]:
    """Indices from 0 of the classes that occur in the case; all where there are few."""
    everything = range(len(picture.class_names))
    if len(everything) <= _LEGEND_CLASSES:
        return list(everything)
    return [index for index in everything if picture.dice[index] is not None]


def _hides(picture: CasePicture) -> bool:
    return any(plane.ignored is not None and bool(plane.ignored.any()) for plane in picture.planes)


def _add_legend(
    figure: Figure, picture: CasePicture, shown: Sequence[int], colours: Sequence[Colour], columns: int
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Patch(color=colours[index]) for index in shown[:_LEGEND_CLASSES]]
    # The number comes first: matplotlib leaves out what begins with an underscore
    labels = [f"{_number(picture.dice[index])}  {_short(picture.class_names[index])}" for index in shown]
    labels = labels[:_LEGEND_CLASSES]
    more = len(shown) - len(labels)
    handles += [Line2D([], [], color="black"), Line2D([], [], color="black", linestyle="dashed")]
    labels += ["label", "prediction (filled)" + (f"; {more} more classes" if more else "")]
    if _hides(picture):
        handles.append(Patch(color=_VEIL))
        labels.append("ignored")
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _title(picture: CasePicture) -> str:
    counted = [value for value in picture.dice if value is not None]
    mean = sum(counted) / len(counted) if counted else None
    of = "all folds" if picture.epoch is None else f"epoch {picture.epoch}"
    return f"{_short(picture.case, 60)}: {picture.role} case of {of}, mean Dice {_number(mean)}"


def _number(dice: float | None) -> str:
    return "–" if dice is None else f"{dice:.3f}"


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
