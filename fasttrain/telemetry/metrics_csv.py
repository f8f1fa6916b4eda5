"""Owns `metrics.csv`: its columns, the row that each epoch adds, and the rows that a resume takes back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fasttrain.errors import StorageError
from fasttrain.telemetry.events import EpochEnded, Event
from fasttrain.telemetry.line_file import LineFile
from fasttrain.whole_files import write_whole

Row = dict[str, float | None]

_BEFORE = ("epoch", "step", "seconds", "train_loss")
_AFTER = ("lr", "patches_per_second", "wait_share", "gpu_util", "gpu_gib")


def class_slugs(class_names: Sequence[str]) -> list[str]:
    """One column-safe name a class, in order: letters, digits, `_`, `-`, `.`; made distinct by `_2`, `_3` …"""
    slugs: list[str] = []
    for name in class_names:
        slug = re.sub(r"[^\w.-]+", "_", name).strip("_") or "class"
        distinct, count = slug, 1
        while distinct in slugs:
            count += 1
            distinct = f"{slug}_{count}"
        slugs.append(distinct)
    return slugs


def metric_columns(
    class_names: Sequence[str], hd95: bool, task: str = "segmentation", slices: bool = False
) -> list[str]:
    """The columns of `metrics.csv` for a recipe's foreground classes; for a dose its scores in Gy, and those of structures.

    slices: the Dice of slices comes behind that of volumes.
    """
    slugs = class_slugs(class_names)
    if task == "dose":
        return [*_BEFORE, "val_dose_score", "val_dvh_score", *(f"val_dvh_{slug}" for slug in slugs), *_AFTER]
    columns = [*_BEFORE, "val_dice", *(f"val_dice_{slug}" for slug in slugs)]
    if slices:
        columns += ["val_slice_dice", *(f"val_slice_dice_{slug}" for slug in slugs)]
    if hd95:
        columns += ["val_hd95", *(f"val_hd95_{slug}" for slug in slugs)]
    return [*columns, *_AFTER]


class MetricsTable:
    """Observer that appends one row to `metrics.csv` as each epoch ends.

    Losses, scores and the learning rate are written with every digit, so that two runs can be compared bit by bit. A
    cell is empty where there is no figure. Raises StorageError where the file cannot be written or has other columns.
    """

    def __init__(
        self, path: Path, class_names: Sequence[str], hd95: bool, task: str = "segmentation", slices: bool = False
    ) -> None:
        self._path = path
        self._class_names = tuple(class_names)
        self._hd95 = hd95
        self._task = task
        self._slices = slices
        self._file = self._open()

    def on_event(self, event: Event) -> None:
        """Appends a row for `EpochEnded`; other events are not for this file."""
        if isinstance(event, EpochEnded):
            self._file.append(",".join(self._cells(event)))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()

    def _open(self) -> LineFile:
        columns = metric_columns(self._class_names, self._hd95, self._task, self._slices)
        found = _whole_lines(self._path)
        if not found:
            _replace(self._path, [",".join(columns)])
        elif found[0].split(",") != columns:
            raise StorageError(
                f"{self._path}: its columns are {found[0]!r}, but this recipe writes {','.join(columns)!r}; "
                "resume with the recipe of the run, or start a new run with --run"
            )
        else:
            drop_rows_after(self._path, None)
        return LineFile(self._path)

    def _cells(self, event: EpochEnded) -> list[str]:
        scores = event.validation
        cells = [str(event.epoch), str(event.step), _rounded(event.seconds, 3), _exact(event.train_loss)]
        if self._task == "dose":
            cells.append(_exact(scores.dose_score if scores else None))
            cells += self._score_cells(scores.dvh_score if scores else None, scores.dvh_by_structure if scores else {})
        else:
            cells += self._score_cells(scores.dice if scores else None, scores.dice_by_class if scores else {})
        if self._slices:
            cells += self._score_cells(
                scores.slice_dice if scores else None, scores.slice_dice_by_class if scores else {}
            )
        if self._hd95:
            cells += self._score_cells(scores.hd95 if scores else None, scores.hd95_by_class if scores else {})
        return [
            *cells,
            _exact(event.learning_rate),
            _rounded(event.patches_per_second, 3),
            _rounded(event.wait_share, 4),
            _rounded(event.gpu_utilisation, 4),
            _rounded(event.gpu_gib, 3),
        ]

    def _score_cells(self, mean: float | None, by_class: dict[str, float | None]) -> list[str]:
        return [_exact(mean), *(_exact(by_class.get(name)) for name in self._class_names)]


def drop_rows_after(path: Path, step: int | None) -> int:
    """Removes rows of steps beyond `step` (None: no bound) and rows that are torn or unreadable; returns how many went.

    The header stays. The file is replaced whole, and only where something has to go; a missing file counts as empty.
    """
    lines = _whole_lines(path)
    if not lines:
        return 0
    if "step" not in lines[0].split(","):
        raise StorageError(f"{path} has no column 'step', so it is no metrics.csv of fasttrain; move it out of the run")
    kept = [lines[0], *(line for line in lines[1:] if _belongs(line, lines[0], step))]
    torn = 0 if path.read_bytes().endswith(b"\n") else 1
    dropped = len(lines) + torn - len(kept)
    if dropped:
        _replace(path, kept)
    return dropped


def read_metrics(path: Path) -> list[Row]:
    """The rows of a `metrics.csv`, None for an empty cell, without torn and unreadable rows; none of a missing file."""
    lines = _whole_lines(path)
    if not lines:
        return []
    columns = lines[0].split(",")
    rows = (line.split(",") for line in lines[1:] if _belongs(line, lines[0], None))
    return [{name: float(cell) if cell else None for name, cell in zip(columns, row, strict=True)} for row in rows]


def _replace(path: Path, lines: list[str]) -> None:
    with write_whole(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def _whole_lines(path: Path) -> list[str]:
    """The file's lines that have their end. A line without one may have lost digits, so that it cannot be trusted."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: could not be read ({error.strerror}); check its permissions") from error
    return [line.removesuffix("\r") for line in text.split("\n")[:-1]]


def _belongs(line: str, header: str, step: int | None) -> bool:
    cells, columns = line.split(","), header.split(",")
    if len(cells) != len(columns):
        return False
    try:
        numbers = [float(cell) for cell in cells if cell]
        row_step = int(cells[columns.index("step")])
    except ValueError:
        return False
    return bool(numbers) and (step is None or row_step <= step)


def _exact(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
