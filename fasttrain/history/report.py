"""Owns the report of a run: what goes onto the page, read from the run's files alone."""

from __future__ import annotations

import time
from pathlib import Path

from fasttrain.history import page
from fasttrain.history.report_cases import cases_section
from fasttrain.history.report_curves import curves_section
from fasttrain.history.report_parts import (
    folds_section,
    machine_section,
    plan_section,
    recipe_section,
    summary_section,
    time_section,
)
from fasttrain.history.standing import RunReader, Standing
from fasttrain.run_folder import RunFolder
from fasttrain.whole_files import write_whole
from fasttrain.wording import counted

_FOLDS_MOST = 1000


def write_report(folder: RunFolder, out: Path | None = None) -> Path:
    """Writes the page of a run, or of all folds of a split, to `out` or `report.html` in its folder, and returns where it lies.

    The page asks for nothing outside of itself. What the run lacks, or what cannot be read, is left out and said. Raises
    StorageError where the page cannot be written.
    """
    began = time.perf_counter()
    run = RunReader(folder.path).read()
    folds = _folds(folder)
    shown = folds or [run]
    parts = [
        summary_section(run, folds),
        folds_section(folds),
        curves_section(shown),
        cases_section(run, shown),
        plan_section(shown[-1]),
        time_section(run, folds),
        machine_section(shown[-1]),
        recipe_section(folder),
    ]
    name = folder.path.resolve().name
    seconds = time.perf_counter() - began
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    foot = f"Made by fasttrain on {made} out of the run's files, in {seconds:.2f} s."
    target = out if out is not None else folder.report
    text = page.page(f"{name}: fasttrain report", [*(part for part in parts if part), f"<footer>{foot}</footer>"])
    with write_whole(target) as file:
        # A file name that is no UTF-8 holds half characters, which no page can
        file.write(text.encode(errors="backslashreplace"))
    return target


def told_of(path: Path, seconds: float) -> str:
    """One line about a report that was written at the end of a run."""
    return f"report: {path} ({counted(path.stat().st_size // 1024, 'KiB', 'KiB')}, written in {seconds:.2f} s)"


def _folds(folder: RunFolder) -> list[Standing]:
    if not folder.folds.exists():
        return []
    paths = [path for path in map(folder.fold, range(_FOLDS_MOST)) if path.is_dir()]
    return [RunReader(path).read() for path in paths]
