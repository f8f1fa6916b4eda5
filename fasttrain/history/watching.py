"""Owns the figures of a run at this moment, for someone who watches it: how far, how good, how fast, and what is left."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from fasttrain.history.card_now import Card
from fasttrain.history.events_so_far import Record, number, text
from fasttrain.history.standing import ENDED, KILLED, NOT_BEGUN, RUNNING, UNSEEN, RunReader, Standing
from fasttrain.run_folder import RunFolder

_HOUR = 3600.0
_FOLDS_MOST = 1000


class Watch:
    """Follows one run, or all folds of a split in one folder, from its files and the driver; asks nothing of the run itself."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.folder = RunFolder(path)
        self._now = now
        self._readers: dict[Path, RunReader] = {}
        self._card: tuple[str | None, Card] | None = None

    def read(self) -> dict[str, Any]:
        """The figures as plain values for JSON; None where nothing is known, so that no figure is ever a made zero."""
        whole = self._standing(self.folder.path)
        folds = self._folds()
        if not folds:
            return self._document(whole)
        begun = [fold for fold in folds if fold.status != NOT_BEGUN]
        now = begun[-1] if begun else folds[0]
        document = self._document(now)
        document |= _of_folds(whole, folds, now, document)
        return document

    def close(self) -> None:
        """Leaves the driver."""
        if self._card is not None:
            self._card[1].close()

    def _standing(self, path: Path) -> Standing:
        if path not in self._readers:
            self._readers[path] = RunReader(path, self._now)
        return self._readers[path].read()

    def _folds(self) -> list[Standing]:
        if not self.folder.folds.exists():
            return []
        paths = [path for path in map(self.folder.fold, range(_FOLDS_MOST)) if path.is_dir()]
        return [self._standing(path) for path in paths]

    def _document(self, run: Standing) -> dict[str, Any]:
        now = self._now()
        pace = _newer(run.step, run.epoch)
        left = _seconds_left(run, pace, now)
        price, cost, hours = run.price_per_hour, run.cost, run.hours
        to_come = None if price is None or left is None else left / _HOUR * price
        return {
            "run": str(run.path),
            "status": run.status,
            "told": run.told,
            "stopped_by": text(run.summary, "stopped_by") if run.status in ENDED else None,
            "exit_code": _whole(number(run.summary, "exit_code")) if run.status in ENDED else None,
            "process": None if run.holder is None else {"id": run.holder.process_id, "host": run.holder.host},
            "seconds_since_last_sign": None if run.last_sign is None else max(now - run.last_sign, 0.0),
            "under_way": _under_way(run),
            "recipe": run.recipe,
            "device": run.device,
            **_progress(run, pace),
            **_results(run),
            "patches_per_second": number(pace, "patches_per_second"),
            "wait_share": number(pace, "wait_share"),
            "gpu": self._gpu(run, pace),
            "seconds_left": left,
            "hours": hours,
            "hours_projected": None if hours is None or left is None else hours + left / _HOUR,
            "price_per_hour": price,
            "cost": cost,
            "cost_left": to_come,
            "cost_projected": None if cost is None or to_come is None else cost + to_come,
            "limits": text(run.started, "limits") or None,
            "attempts": run.attempts,
            "resume_command": _resume_command(run),
            "warnings": run.warnings,
            "faults": run.faults,
            "fold": None,
        }

    def _gpu(self, run: Standing, pace: Record | None) -> dict[str, Any]:
        """What the run last said of its card, and what the driver says of it now, where the run is at work on this machine."""
        told = {"utilisation": number(pace, "gpu_utilisation"), "gib": number(pace, "gpu_gib")}
        if not run.on_gpu:
            return {"told_by_run": told, "now": None, "why_not": "the run is on the CPU" if run.device else None}
        if not run.running:
            return {"told_by_run": told, "now": None, "why_not": "the run is not at work"}
        if run.holder is not None and not run.holder.here:
            return {"told_by_run": told, "now": None, "why_not": f"the card is in {run.holder.host}"}
        if self._card is None or self._card[0] != run.gpu_uuid:
            self.close()
            self._card = (run.gpu_uuid, Card(run.gpu_uuid, run.visible_devices))
        figures = self._card[1].read()
        return {
            "told_by_run": told,
            "now": None if figures is None else figures.record(),
            "why_not": self._card[1].why_not,
        }


def _progress(run: Standing, pace: Record | None) -> dict[str, Any]:
    started = run.started
    # Of a new attempt nothing is logged yet, and the epochs before it are all there is
    steps = _whole(number(started, "steps_per_epoch"))
    epochs = _whole(number(started, "epochs"))
    open_epoch = _whole(number(run.step, "epoch"))
    within = _whole(number(run.step, "step_in_epoch"))
    if pace is not run.step or pace is None:
        open_epoch, within = None, None
    return {
        "epochs": epochs,
        "epochs_done": run.epochs_done,
        "epoch": open_epoch or (run.epochs_done or None),
        "step_in_epoch": within,
        "steps_per_epoch": steps,
        "step": _whole(number(pace, "step")) or _whole(run.rows[-1].get("step") if run.rows else None),
        "steps": None if steps is None or epochs is None else steps * epochs,
    }


def _results(run: Standing) -> dict[str, Any]:
    rows, validated = run.rows, run.validated
    epoch = number(validated, "epoch")
    # An epoch that a resume took back is no result
    stands = epoch is not None and (not rows or epoch in {row["epoch"] for row in rows})
    found = validated.get("validation") if stands and validated is not None else None
    scores = {key: value for key, value in found.items() if key != "seconds"} if isinstance(found, dict) else None
    return {
        "loss": number(run.step, "loss"),
        "learning_rate": number(_newer(run.step, run.epoch), "learning_rate"),
        "train_loss": rows[-1].get("train_loss") if rows else None,
        "train_losses": [row.get("train_loss") for row in rows],
        "scores": None if scores is None else {"epoch": _whole(epoch), **scores},
        "best": _best(run),
    }


def _best(run: Standing) -> dict[str, Any] | None:
    if run.best is None:
        return None
    metric, value, epoch = run.best
    return {"metric": metric, "value": value, "epoch": epoch or None}


def _seconds_left(run: Standing, pace: Record | None, now: float) -> float | None:
    """Until the last epoch is over: while the run is at work what was told, less the time since; afterwards as it was told."""
    left, since = number(pace, "seconds_left"), _moment(pace)
    if run.status == "done" or left is None:
        return None
    if run.status not in (RUNNING, UNSEEN) or since is None:
        return left
    # A new attempt has not come to where the one before it was
    return None if pace is run.epoch and not run.first_step_taken else max(left - max(now - since, 0.0), 0.0)


def _under_way(run: Standing) -> dict[str, Any] | None:
    if run.status not in (RUNNING, UNSEEN):
        return None
    work = run.under_way
    if work is not None:
        done, total = _whole(number(work, "done")), _whole(number(work, "total"))
        return {"what": text(work, "what"), "done": done, "total": total}
    if run.first_step_taken:
        return {"what": "training", "done": None, "total": None}
    return {"what": "preparing", "done": None, "total": None}


def _resume_command(run: Standing) -> str | None:
    left = run.status in (KILLED, UNSEEN, "stopped", "failed") and RunFolder(run.path).holds_a_run()
    return f"fasttrain resume {shlex.quote(str(RunFolder(run.path).whole()))}" if left else None


def _of_folds(whole: Standing, folds: list[Standing], now: Standing, document: dict[str, Any]) -> dict[str, Any]:
    """What is of all folds: which of them is at work, how it stands with the whole, and what all of them take."""
    count = _whole(number(_folds_record(whole), "folds")) or len(folds)
    status, told = whole.status, whole.told
    if now.status in (RUNNING, KILLED, UNSEEN) and status != RUNNING:
        status, told = now.status, now.told
    hours = [fold.hours for fold in folds if fold.hours is not None]
    costs = [fold.cost for fold in folds if fold.cost is not None]
    of_this, left, price = now.hours, document["seconds_left"], now.price_per_hour
    to_begin = count - len([fold for fold in folds if fold.status != NOT_BEGUN])
    if left is not None and of_this is not None:
        # Those that are still to come are taken to last as long as this one
        left += to_begin * (of_this * _HOUR + left)
    cost_left = None if left is None or price is None else left / _HOUR * price
    return {
        "run": str(whole.path),
        "status": status,
        "told": told,
        "stopped_by": text(whole.summary, "stopped_by") if status in ENDED else None,
        "exit_code": _whole(number(whole.summary, "exit_code")) if status in ENDED else None,
        # Of an ended whole the score of all cases, else that of the fold
        "best": _best(whole) or document["best"],
        "seconds_left": left if status != "done" else None,
        "hours": sum(hours) if hours else None,
        "hours_projected": sum(hours) + left / _HOUR if hours and left is not None else None,
        "cost": sum(costs) if costs else None,
        "cost_left": cost_left,
        "cost_projected": sum(costs) + cost_left if costs and cost_left is not None else None,
        "fold": {"run": str(now.path), "number": _fold_number(now.path), "folds": count},
        "folds": [
            {"run": fold.path.name, "status": fold.status, "best": None if fold.best is None else fold.best[1]}
            for fold in folds
        ],
    }


def _folds_record(whole: Standing) -> Record:
    try:
        found = json.loads(RunFolder(whole.path).folds.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fold_number(path: Path) -> int | None:
    digits = path.name.removeprefix("fold_")
    return int(digits) if digits.isdecimal() else None


def _newer(one: Record | None, other: Record | None) -> Record | None:
    """The one that was written later; of one moment the second, which an epoch ends with."""
    if one is None or other is None:
        return one or other
    return one if (_moment(one) or 0.0) > (_moment(other) or 0.0) else other


def _moment(record: Record | None) -> float | None:
    try:
        return None if record is None else datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
