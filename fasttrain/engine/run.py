"""Owns a run from first to last: folder, plan, assembly, fit, summary; the same for the command line and for Python."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.batches import ended_worker
from fasttrain.checkpoints import ReadCheckpoint, newest_good
from fasttrain.data.caches import estimate_bytes
from fasttrain.data.location import data_root
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.unlabelled import channel_suffixes
from fasttrain.data.splits import Split, split_cases
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.fit import Fit
from fasttrain.engine.plan import Plan, make_plan, sizes_of
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_BUG, DataError, FasttrainError, RecipeError, StorageError
from fasttrain.machine.hardware import Hardware, environment_record, survey
from fasttrain.machine.threads import limit_threads, thread_count
from fasttrain.recipe import Recipe, ResolvedRecipe, resolve
from fasttrain.run_folder import (
    ENVIRONMENT_KEYS,
    FORMAT_VERSION,
    PLAN_KEYS,
    RunFolder,
    new_run_path,
    read_record,
    write_json,
    write_whole,
)
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.event_log import EventLog
from fasttrain.telemetry.events import Event, Message, Observer, Progress, RunEnded, RunStarted
from fasttrain.telemetry.metrics_csv import MetricsTable, drop_rows_after
from fasttrain.telemetry.plots import write_plots
from fasttrain.telemetry.summary import write_summary


@dataclass(frozen=True)
class RunResult:
    """How a run ended: its folder, what `summary.json` says, and the exit code of the command line."""

    run: Path
    summary: dict[str, Any]
    exit_code: int


@dataclass(frozen=True)
class Prepared:
    """A run that is decided but not begun: everything that `--dry-run` shows."""

    recipe: Recipe
    hardware: Hardware
    root: Path
    split: Split
    plan: Plan


@dataclass
class _Session:
    """What the parts of one run share: whom to tell, when it began, whether to stop."""

    observers: list[Observer]
    stop: StopRequest
    began: float
    seconds: dict[str, float | None] = field(default_factory=dict)

    def emit(self, event: Event) -> None:
        for observer in self.observers:
            observer.on_event(event)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()


def prepare(
    recipe: Recipe,
    data: Path | None = None,
    device: str = "auto",
    emit: Callable[[Event], None] = lambda _: None,
    former: Mapping[str, Any] | None = None,
    former_device: str | None = None,
) -> Prepared:
    """Finds cases, parts them, looks at the machine and decides the plan; nothing is written but a phantom's data.

    Raises RecipeError, DataError and MachineError.
    """
    hardware = survey(device)
    limit_threads(thread_count(recipe.acceleration.threads, hardware.on_gpu)[0])
    root = data_root(recipe, data, os.environ)
    found = find_cases(recipe.data, root)
    for warning in found.warnings:
        emit(Message(warning, "warning"))
    split = split_cases(found.cases, recipe.data.split)
    counts = (len(split.train), len(split.validation), len(split.test))
    sizes = sizes_of(recipe, counts, estimate_bytes([*split.train, *split.validation], recipe))
    return Prepared(recipe, hardware, root, split, make_plan(recipe, hardware, sizes, former, former_device))


def train(
    recipe: ResolvedRecipe | str,
    *,
    data: Path | str | None = None,
    run: Path | str | None = None,
    device: str = "auto",
    observers: Sequence[Observer] = (),
    stop: StopRequest | None = None,
    began: float | None = None,
) -> RunResult:
    """Trains a recipe (a name, a file, or one from `load_recipe`) in a new run folder and returns how it ended.

    data: the folder of the set, else `$FASTTRAIN_DATA/NAME` or `./data/NAME`. run: the new folder, else
    `./runs/NAME-TIMESTAMP`. device: `auto`, `cpu`, `cuda` or `cuda:N`. observers: told of everything that happens. began:
    when the process began, for the time to the first step (Unix seconds). Raises FasttrainError of the kind that fits.
    """
    resolved = resolve(recipe) if isinstance(recipe, str) else recipe
    session = _Session(list(observers), stop or StopRequest(), began or time.time())
    folder = RunFolder(Path(run) if run is not None else new_run_path(resolved.recipe.name))
    try:
        folder.check_new()
        prepared = prepare(resolved.recipe, Path(data) if data is not None else None, device, session.emit)
        folder.create()
        with write_whole(folder.recipe) as stream:
            stream.write(resolved.as_yaml().encode())
        _record_start(folder, prepared, device)
        return _carry_out(folder, prepared, session, saved=None)
    finally:
        folder.release()
        session.close()


def resume(
    run: Path | str,
    *,
    data: Path | str | None = None,
    device: str | None = None,
    observers: Sequence[Observer] = (),
    stop: StopRequest | None = None,
    began: float | None = None,
) -> RunResult:
    """Goes on with a run from its newest sound checkpoint, exactly as if it had not been interrupted.

    A finished run is left as it is. A run that was interrupted before its first checkpoint begins again from step 0, which is
    the same. Raises RecipeError where `run` holds no run, DataError where the cases are no longer the same, StorageError where
    checkpoints were written and none is sound.
    """
    session = _Session(list(observers), stop or StopRequest(), began or time.time())
    folder = RunFolder(Path(run))
    if not folder.holds_a_run():
        raise RecipeError(f"{run} holds no run (it has no recipe.yaml); `fasttrain train` begins one")
    if folder.finished():
        session.close()
        return RunResult(folder.path, json.loads(folder.summary.read_text()), 0)
    try:
        folder.claim()
        folder.tidy()
        recipe = resolve(str(folder.recipe)).recipe
        start, plan = _read_start(folder)
        chosen = device or start["arguments"]["device"]
        root = Path(data) if data is not None else Path(start["arguments"]["data"])
        saved: ReadCheckpoint | None = None
        if folder.has_checkpoints():
            saved = newest_good(folder.last, [folder.best, *folder.epoch_files()])
        prepared = prepare(recipe, root, chosen, session.emit, plan, start["hardware"]["device_name"])
        _check_same_cases(plan["cases"], prepared.split, prepared.root)
        _drop_newer_rows(folder, saved)
        return _carry_out(folder, prepared, session, saved)
    finally:
        folder.release()
        session.close()


def _carry_out(folder: RunFolder, prepared: Prepared, session: _Session, saved: ReadCheckpoint | None) -> RunResult:
    """Builds and fits; whatever happens, `summary.json` says how it ended."""
    recipe, hardware = prepared.recipe, prepared.hardware
    names = recipe.data.class_names
    session.observers += [MetricsTable(folder.metrics, names, recipe.validation.hd95), EventLog(folder.events)]
    monitor = DeviceMonitor(hardware.gpu_uuid)
    assembly: Assembly | None = None
    fit: Fit | None = None
    try:
        session.emit(_started(folder, prepared, saved))
        prepare_torch(prepared.plan, hardware)
        assembly = build(recipe, prepared.plan, hardware, prepared.split, _case_progress(session))
        if saved is not None:
            _restore(assembly, saved, session)
        fit = Fit(assembly, recipe, folder, session.emit, session.stop, monitor)
        fit.run()
        return _end(folder, prepared, session, fit, failure=None)
    except Stopped:
        return _end(folder, prepared, session, fit, failure=None)
    except BaseException as error:
        known = ended_worker(error, prepared.plan.workers)
        _end(folder, prepared, session, fit, failure=known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        monitor.close()
        if assembly is not None:
            assembly.close()


def _case_progress(session: _Session) -> Callable[[str, int, int], None]:
    def told(what: str, done: int, total: int) -> None:
        session.emit(Progress(what, done, total))
        session.stop.check()

    return told


def _started(folder: RunFolder, prepared: Prepared, saved: ReadCheckpoint | None) -> RunStarted:
    sizes = prepared.plan.sizes
    return RunStarted(
        run=str(folder.path),
        recipe=prepared.recipe.name,
        device=prepared.hardware.device_name,
        epochs=sizes.epochs,
        steps_per_epoch=sizes.steps_per_epoch,
        training_cases=sizes.training_cases,
        validation_cases=sizes.validation_cases,
        decisions=tuple((decision.name, decision.value, decision.reason) for decision in prepared.plan.decisions),
        resumed_step=None if saved is None else int(saved.state["progress"]["step"]),
    )


def _restore(assembly: Assembly, saved: ReadCheckpoint, session: _Session) -> None:
    assembly.state.restore(saved.state, str(saved.path))
    progress = assembly.state.progress
    for sentence in saved.damaged:
        session.emit(Message(sentence, "warning"))
    if saved.damaged:
        session.emit(
            Message(
                f"going on from {saved.path.name}, which holds epoch {progress.epoch}, step {progress.step}; "
                "what came after it is trained again",
                "warning",
            )
        )


def _drop_newer_rows(folder: RunFolder, saved: ReadCheckpoint | None) -> None:
    """Before the table is opened: rows newer than the checkpoint belong to steps that are taken again."""
    progress = saved.state["progress"] if saved is not None else {"step": 0, "step_in_epoch": 0}
    # A row of the epoch that is open was written just before a kill, its checkpoint not: that epoch is closed again
    drop_rows_after(folder.metrics, progress["step"] - (1 if progress["step_in_epoch"] else 0))


def _end(
    folder: RunFolder, prepared: Prepared, session: _Session, fit: Fit | None, failure: BaseException | None
) -> RunResult:
    """Writes plots and the summary, and tells the observers."""
    stopped = session.stop.reason if failure is None and session.stop.asked else None
    done = failure is None and (stopped is None or (fit is not None and _went_to_its_end(fit)))
    exit_code = _exit_code(failure) if failure is not None else (0 if done else session.stop.exit_code)
    status = "failed" if failure is not None else ("done" if done else "stopped")
    progress = fit.progress if fit is not None else None
    seconds = {
        "total": time.time() - session.began,
        "to_first_step": fit.first_step_at - session.began if fit is not None and fit.first_step_at else None,
        "training": progress.training_seconds if progress else None,
        "validation": progress.validation_seconds if progress else None,
    }
    best = {"metric": "val_dice", "value": progress.best_value, "epoch": progress.best_epoch} if progress else None
    with _not_masking(failure):
        if prepared.recipe.output.plots and folder.metrics.exists():
            write_plots(folder.metrics, folder.plots)
        write_summary(
            folder.summary,
            status=status,
            stopped_by=None if done else stopped,
            exit_code=exit_code,
            best=best,
            seconds=seconds,
            epochs=progress.epoch if progress else 0,
            steps=progress.step if progress else 0,
            error=None if failure is None else str(failure) or type(failure).__name__,
            cases=_case_scores(fit),
            device=prepared.hardware.device_name,
        )
    session.emit(
        RunEnded(
            status=status,
            stopped_by=None if done else stopped,
            exit_code=exit_code,
            best_metric="dice",
            best_value=progress.best_value if progress else None,
            best_epoch=progress.best_epoch if progress else None,
            seconds=seconds["total"] or 0.0,
            run=str(folder.path),
            resume_command=None if done else f"fasttrain resume {folder.path}",
        )
    )
    summary = json.loads(folder.summary.read_text()) if folder.summary.exists() else {}
    return RunResult(folder.path, summary, exit_code)


class _not_masking:  # noqa: N801 - reads as a phrase
    """While an error is on its way out, trouble with the summary must not take its place."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return self.failure is not None and kind is not None and issubclass(kind, Exception)


def _went_to_its_end(fit: Fit) -> bool:
    return fit.progress.epoch >= fit.recipe.training.epochs


def _exit_code(failure: BaseException) -> int:
    if isinstance(failure, FasttrainError):
        return failure.exit_code
    return 130 if isinstance(failure, KeyboardInterrupt) else EXIT_BUG


def _case_scores(fit: Fit | None) -> dict[str, list[float | None]]:
    """Dice a class of each case, of the last validation."""
    if fit is None or fit.last_scores is None:
        return {}
    return {score.name: [one.dice for one in score.classes] for score in fit.last_scores.cases}


def _record_start(folder: RunFolder, prepared: Prepared, device: str) -> None:
    record = environment_record(prepared.hardware)
    record["format"] = FORMAT_VERSION
    record["arguments"] = {"data": str(prepared.root.absolute()), "device": device}
    write_json(folder.environment, record)
    names = {
        part: [case.name for case in getattr(prepared.split, attribute)]
        for part, attribute in (("training", "train"), ("validation", "validation"), ("test", "test"))
    }
    suffixes = channel_suffixes(prepared.recipe.data, prepared.split.train[0])
    write_json(folder.plan, {**prepared.plan.record(), "cases": names, "channel_suffixes": suffixes})


def _read_start(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """`environment.json` and `plan.json` as they were written when the run began."""
    record = read_record(folder.environment, ENVIRONMENT_KEYS)
    if record["format"] != FORMAT_VERSION:
        raise StorageError(f"{folder.path} has run format {record['format']}; this fasttrain reads {FORMAT_VERSION}")
    return record, read_record(folder.plan, PLAN_KEYS)


def _check_same_cases(recorded: Mapping[str, list[str]], split: Split, root: Path) -> None:
    faults = []
    for part, cases in (("training", split.train), ("validation", split.validation)):
        then, now = set(recorded[part]), {case.name for case in cases}
        if then != now:
            differing = sorted(then ^ now)
            faults.append(
                f"{root}: the {part} cases are not those the run began with ({len(then)} then, {len(now)} now; "
                f"for example {', '.join(differing[:3])}); name the folder it began with by --data, or begin anew"
            )
    if faults:
        raise DataError(faults)
