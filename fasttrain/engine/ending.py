"""Owns how a run ends: plots, `summary.json`, and what the observers and the caller are told."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fasttrain.checkpoints import ReadCheckpoint
from fasttrain.engine.fit import Fit
from fasttrain.engine.former_scores import former_scores
from fasttrain.engine.preparing import Prepared
from fasttrain.engine.resuming.going_on import GoingOn
from fasttrain.engine.session import Session
from fasttrain.engine.state import Progress
from fasttrain.errors import EXIT_DONE, exit_code_of
from fasttrain.history.report import told_of, write_report
from fasttrain.machine.own_launcher import own_launcher
from fasttrain.run_folder import RunFolder
from fasttrain.scoring.slices import slices_by_case
from fasttrain.telemetry.events import Message, RunEnded
from fasttrain.telemetry.plots import write_plots
from fasttrain.telemetry.summary import write_summary


@dataclass(frozen=True)
class RunResult:
    """How a run ended: its folder, what `summary.json` says, and the exit code of the command line."""

    run: Path
    summary: dict[str, Any]
    exit_code: int


def end_run(
    folder: RunFolder,
    prepared: Prepared,
    session: Session,
    fit: Fit | None,
    saved: ReadCheckpoint | None,
    failure: BaseException | None,
) -> RunResult:
    """Writes plots and the summary, and tells the observers.

    saved: what the run went on from; where it was stopped or refused before it took that up, it is as far as it was then.
    """
    stopped = session.stop.reason if failure is None and session.stop.asked else None
    whole = fit is not None and fit.scored and fit.progress.epoch >= fit.recipe.training.epochs
    # A limit that the user set ends a run as done; that it was asked for is told unless the last epoch was reached anyway
    done = failure is None and (stopped is None or whole or session.stop.exit_code == EXIT_DONE)
    stopped_by = None if whole else stopped
    exit_code = exit_code_of(failure) if failure is not None else (0 if done else session.stop.exit_code)
    status = "failed" if failure is not None else ("done" if done else "stopped")
    progress = fit.progress if fit is not None else _saved_progress(saved)
    seconds = {
        "total": fit.total_seconds() if fit is not None else _earlier_seconds(progress) + time.time() - session.began,
        "to_first_step": session.start.total,
        "start": session.start.seconds or None,
        "training": progress.training_seconds if progress else None,
        "validation": progress.validation_seconds if progress else None,
    }
    metric = prepared.recipe.task_facts.metric
    best = {"metric": f"val_{metric}", "value": progress.best_value, "epoch": progress.best_epoch} if progress else None
    in_haste = session.stop.asked and session.stop.exit_code != EXIT_DONE
    with _not_masking(failure):
        if not in_haste:
            _plot(folder, prepared)
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
            cases=_case_scores(fit) or _former_scores(folder, saved),
            **_slice_scores(fit, folder, saved),
            skipped_cases={name: list(faults) for name, faults in prepared.skipped.items()},
            device=prepared.hardware.device_name,
            checkpoint=(fit.saver.figures if fit is not None else None) or None,
            **session.account.record(fit.seconds_left() if fit is not None else None),
        )
    if not in_haste:
        _report(folder, prepared, session)
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
            resume_command=_resume_command(folder, session, status, stopped_by),
            run_hours=session.account.hours(),
            run_cost=session.account.cost(),
        )
    )
    session.stop.has_told()
    if in_haste:
        # Last of all: they take seconds, and a pod that is taken back leaves five
        with _not_masking(failure), session.stop.at_rest():
            _plot(folder, prepared)
            # Unless it failed, without a word: the last one is how to go on
            _report(folder, prepared, session, told=False)
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    return RunResult(folder.path, summary, exit_code)


def _plot(folder: RunFolder, prepared: Prepared) -> None:
    if prepared.recipe.output.plots and folder.metrics.exists():
        write_plots(folder.metrics, folder.plots)


def _report(folder: RunFolder, prepared: Prepared, session: Session, told: bool = True) -> None:
    """Whatever is wrong with the page is one line: the run has ended as it has."""
    if not prepared.recipe.output.report:
        return
    began = time.perf_counter()
    try:
        path = write_report(folder)
        line = told_of(path, time.perf_counter() - began)
    except Exception as error:
        session.emit(Message(f"no report was written: {str(error) or type(error).__name__}", "warning"))
        return
    if told:
        session.emit(Message(line))


def _resume_command(folder: RunFolder, session: Session, status: str, stopped_by: str | None) -> str | None:
    """How the run goes on, under the same limits; None where it does not, or where a limit is to be widened first."""
    done = status == "done"
    if (done and not (stopped_by or "").startswith("--max-hours")) or folder.never_trained():
        return None
    return resume_line(folder, session)


def resume_line(folder: RunFolder, session: Session) -> str:
    """The command line by which a run goes on, under the limits of this session."""
    gpus = f" --gpus {session.ranks.place.local_ranks}" if own_launcher() is not None else ""
    return f"fasttrain resume {shlex.quote(str(folder.whole()))}{gpus}{session.limits.options}"


def end_spent(folder: RunFolder, session: Session, going: GoingOn, limit: str, told: str) -> RunResult:
    """Ends a run whose money was spent before it could go on: it is done by its limit, and otherwise as its checkpoint is."""
    session.emit(Message(told))
    saved, metric = going.saved, going.resolved.recipe.task_facts.metric
    if not folder.finished():
        former, progress = folder.read_summary(), _saved_progress(saved) or Progress()
        write_summary(
            folder.summary,
            status="done",
            stopped_by=limit,
            exit_code=EXIT_DONE,
            best={"metric": f"val_{metric}", "value": progress.best_value, "epoch": progress.best_epoch},
            seconds={
                "total": progress.total_seconds,
                "training": progress.training_seconds,
                "validation": progress.validation_seconds,
            },
            epochs=progress.epoch,
            steps=progress.step,
            error=None,
            cases=_former_scores(folder, saved),
            **_slice_scores(None, folder, saved),
            skipped_cases=former.get("skipped_cases", {}),
            device=former.get("device"),
            **session.account.record(None),
        )
    return RunResult(folder.path, folder.read_summary(), EXIT_DONE)


class _not_masking:  # noqa: N801 - reads as a phrase
    """While an error is on its way out, trouble with the summary must not take its place."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return self.failure is not None and kind is not None and issubclass(kind, Exception)


def _saved_progress(saved: ReadCheckpoint | None) -> Progress | None:
    if saved is None:
        return None
    # One of another version, which is why it was refused, may have other fields
    known = {field.name for field in fields(Progress)}
    return Progress(**{key: value for key, value in saved.state["progress"].items() if key in known})


def _earlier_seconds(progress: Progress | None) -> float:
    return progress.total_seconds if progress is not None else 0.0


def _case_scores(fit: Fit | None) -> dict[str, dict[str, float | None]]:
    """The scores of each case, of the last validation."""
    if fit is None or fit.last_scores is None:
        return {}
    return fit.last_scores.by_case(fit.recipe.data.scored_names)


def _slice_scores(fit: Fit | None, folder: RunFolder, saved: ReadCheckpoint | None) -> dict[str, Any]:
    """`case_slices`, what the Dice of slices is pooled from over folds; nothing where volumes are not cut into slices."""
    if fit is not None and fit.last_scores is not None:
        found: dict[str, Any] = slices_by_case(fit.last_scores.cases, fit.recipe.data.scored_names)
    elif saved is not None:
        found = former_scores(folder, int(saved.state["progress"]["step"]), "case_slices")
    else:
        found = {}
    return {"case_slices": found} if found else {}


def _former_scores(folder: RunFolder, saved: ReadCheckpoint | None) -> dict[str, Any]:
    """Those of the very step that the run went on from."""
    return {} if saved is None else former_scores(folder, int(saved.state["progress"]["step"]))
