"""Owns how a run ends: plots, `summary.json`, and what the observers and the caller are told."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.engine.fit import Fit
from fasttrain.engine.preparing import Prepared
from fasttrain.engine.session import Session
from fasttrain.errors import EXIT_DONE, exit_code_of
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import RunEnded
from fasttrain.telemetry.plots import write_plots
from fasttrain.telemetry.summary import write_summary


@dataclass(frozen=True)
class RunResult:
    """How a run ended: its folder, what `summary.json` says, and the exit code of the command line."""

    run: Path
    summary: dict[str, Any]
    exit_code: int


def end_run(
    folder: RunFolder, prepared: Prepared, session: Session, fit: Fit | None, failure: BaseException | None
) -> RunResult:
    """Writes plots and the summary, and tells the observers."""
    stopped = session.stop.reason if failure is None and session.stop.asked else None
    whole = fit is not None and fit.progress.epoch >= fit.recipe.training.epochs
    # A limit that the user set ends a run as done; that it was asked for is told unless the last epoch was reached anyway
    done = failure is None and (stopped is None or whole or (fit is not None and session.stop.exit_code == EXIT_DONE))
    stopped_by = None if whole else stopped
    exit_code = exit_code_of(failure) if failure is not None else (0 if done else session.stop.exit_code)
    status = "failed" if failure is not None else ("done" if done else "stopped")
    progress = fit.progress if fit is not None else None
    seconds = {
        "total": fit.total_seconds() if fit is not None else time.time() - session.began,
        "to_first_step": session.start.total,
        "start": session.start.seconds or None,
        "training": progress.training_seconds if progress else None,
        "validation": progress.validation_seconds if progress else None,
    }
    metric = prepared.recipe.task_facts.metric
    best = {"metric": f"val_{metric}", "value": progress.best_value, "epoch": progress.best_epoch} if progress else None
    with _not_masking(failure):
        if prepared.recipe.output.plots and folder.metrics.exists():
            write_plots(folder.metrics, folder.plots)
        write_summary(
            folder.summary,
            status=status,
            stopped_by=stopped_by,
            exit_code=exit_code,
            best=best,
            seconds=seconds,
            epochs=progress.epoch if progress else 0,
            steps=progress.step if progress else 0,
            error=None if failure is None else str(failure) or type(failure).__name__,
            cases=_case_scores(fit),
            skipped_cases={name: list(faults) for name, faults in prepared.skipped.items()},
            device=prepared.hardware.device_name,
        )
    session.emit(
        RunEnded(
            status=status,
            stopped_by=stopped_by,
            exit_code=exit_code,
            best_metric=prepared.recipe.task_facts.metric_text,
            best_value=progress.best_value if progress else None,
            best_epoch=progress.best_epoch if progress else None,
            seconds=time.time() - session.began,
            run=str(folder.path),
            resume_command=None
            if done or folder.never_trained()
            else f"fasttrain resume {shlex.quote(str(folder.whole()))}",
        )
    )
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    return RunResult(folder.path, summary, exit_code)


class _not_masking:  # noqa: N801 - reads as a phrase
    """While an error is on its way out, trouble with the summary must not take its place."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return self.failure is not None and kind is not None and issubclass(kind, Exception)


def _case_scores(fit: Fit | None) -> dict[str, dict[str, float | None]]:
    """The scores of each case, of the last validation."""
    if fit is None or fit.last_scores is None:
        return {}
    return fit.last_scores.by_case(fit.recipe.data.class_names)
