"""Owns the list of the runs in a folder with their key figures; what is damaged is listed as that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fasttrain.history.events_so_far import number, text
from fasttrain.history.key_figures import machine_of, pace_of
from fasttrain.history.standing import ENDED, KILLED, NOT_BEGUN, RunReader, Standing
from fasttrain.history.watching import Watch
from fasttrain.run_folder import RunFolder

DAMAGED = "damaged"


@dataclass(frozen=True)
class Listed:
    """A run's key figures; None where they are not known. `began` in Unix seconds; `patches_per_second`: the median epoch's.

    `best` is metric, value, epoch. `faults` say what is damaged; `status` is then `damaged` unless a process is at work on it.
    """

    path: Path
    recipe: str | None
    status: str
    stopped_by: str | None
    began: float | None
    best: tuple[str, float, int] | None
    epochs_done: int
    epochs: int | None
    patches_per_second: float | None
    hours: float | None
    cost: float | None
    machine: str | None
    host: str | None
    faults: list[str]

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "run": str(self.path),
            "recipe": self.recipe,
            "status": self.status,
            "stopped_by": self.stopped_by,
            "began": self.began,
            "best": None if self.best is None else dict(zip(("metric", "value", "epoch"), self.best, strict=True)),
            "epochs_done": self.epochs_done,
            "epochs": self.epochs,
            "patches_per_second": self.patches_per_second,
            "hours": self.hours,
            "cost": self.cost,
            "machine": self.machine,
            "host": self.host,
            "faults": self.faults,
        }


def list_runs(base: Path) -> list[Listed]:
    """The runs in `base`, newest first, those without a known beginning last. Other folders are no runs and are left out.

    Raises OSError where `base` cannot be looked into.
    """
    found = [listed(RunFolder(path)) for path in sorted(base.iterdir()) if not path.name.startswith(".")]
    runs = [run for run in found if run is not None]
    return sorted(runs, key=lambda run: (run.began is not None, run.began or 0.0), reverse=True)


def is_run(folder: RunFolder) -> bool:
    """Whether the folder holds a run, whole, damaged or cut short before it was one."""
    of_a_run = (
        folder.recipe,
        folder.events,
        folder.metrics,
        folder.summary,
        folder.environment,
        folder.plan,
        folder.folds,
    )
    try:
        return any(path.exists() for path in of_a_run) or folder.has_checkpoints()
    except OSError:
        # What cannot be looked into may be one
        return True


def listed(folder: RunFolder) -> Listed | None:
    """One run's line; None where the folder is none."""
    try:
        if not is_run(folder):
            return None
        if folder.folds.exists():
            return _of_folds(folder)
        return _of_run(RunReader(folder.path).read())
    except OSError as error:
        told = f"it cannot be looked into: {error.strerror or error}"
        return Listed(folder.path, None, DAMAGED, None, None, None, 0, None, None, None, None, None, None, [told])


def _of_run(run: Standing) -> Listed:
    status = DAMAGED if run.faults and not run.running else run.status
    return Listed(
        path=run.path,
        recipe=run.recipe,
        status=status,
        stopped_by=text(run.summary, "stopped_by") if run.status in ENDED else None,
        began=run.began,
        best=run.best,
        epochs_done=run.epochs_done,
        epochs=_whole(number(run.started, "epochs")),
        patches_per_second=pace_of(run),
        hours=run.hours,
        cost=run.cost,
        machine=machine_of(run.environment) or run.device,
        host=run.host,
        faults=run.faults,
    )


def _of_folds(folder: RunFolder) -> Listed:
    """All folds as one run: the pooled score, and what they took together."""
    whole = RunReader(folder.path).read()
    watch = Watch(folder.path)
    try:
        now = watch.read()
    finally:
        watch.close()
    names = [fold["run"] for fold in now.get("folds", ())]
    folds = [RunReader(folder.path / name).read() for name in names]
    begun = [fold for fold in folds if fold.status != NOT_BEGUN]
    faults = [*whole.faults, *(f"{fold.path.name}: {fault}" for fold in folds for fault in fold.faults)]
    rates = [rate for fold in begun if (rate := pace_of(fold)) is not None]
    epochs = _whole(number(folds[0].started, "epochs")) if folds else None
    count = (now["fold"] or {}).get("folds") or len(folds)
    return Listed(
        path=folder.path,
        recipe=whole.recipe or next((fold.recipe for fold in folds), None),
        status=DAMAGED if faults and now["status"] != "running" else now["status"],
        stopped_by=now["stopped_by"],
        began=whole.began,
        best=whole.best,
        epochs_done=sum(fold.epochs_done for fold in folds),
        epochs=None if epochs is None else epochs * count,
        patches_per_second=median(rates) if rates else None,
        hours=now["hours"],
        cost=now["cost"],
        machine=next((name for fold in folds if (name := machine_of(fold.environment) or fold.device)), None),
        host=next((fold.host for fold in folds if fold.host), None),
        faults=faults,
    )


def told_briefly(run: Listed) -> str:
    """The status in a few words, `done, early stopping` or `killed`."""
    if run.status == DAMAGED and run.faults:
        return f"{DAMAGED}: {run.faults[0]}"
    if run.status == KILLED or run.stopped_by is None:
        return run.status
    return f"{run.status}, {run.stopped_by}"


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
