"""Owns a run from first to last: folder, plan, assembly, fit, end; the same for the command line and for Python."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fasttrain.checkpoints import ReadCheckpoint, newest_good
from fasttrain.data.seen_files import SEEN
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.ending import RunResult, end_run
from fasttrain.engine.failures import explained
from fasttrain.engine.fit import Fit
from fasttrain.engine.gpu_memory import stitching_bytes
from fasttrain.engine.phases import TRAINING
from fasttrain.engine.preparing import Prepared, prepare, read_start, recipe_changed, record_start
from fasttrain.engine.session import Session
from fasttrain.engine.sound_cases import changed_text, check_same_cases
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validation_memory import prepare_validation
from fasttrain.errors import FasttrainError, RecipeError, StorageError
from fasttrain.machine.limits import memory_free
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder, new_run_path, write_whole
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.event_log import EventLog, read_events
from fasttrain.telemetry.events import Message, Observer, Progress, RunStarted
from fasttrain.telemetry.metrics_csv import MetricsTable, drop_rows_after, read_metrics
from fasttrain.telemetry.pictures import drop_pictures
from fasttrain.telemetry.tensorboard import TensorBoardLog
from fasttrain.wording import counted

_SHARE_FOR_FILES = 8
"""One part in so many of the free memory may hold files that the check read until the cache is made of them."""

__all__ = ["RunResult", "Prepared", "prepare", "resume", "train"]


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
    when the process began, for the time to the first step (Unix seconds). Raises FasttrainError of the kind that fits, and
    Stopped where `stop` was asked for while cases were checked: there is no run yet.
    """
    resolved = resolve(recipe) if isinstance(recipe, str) else recipe
    session = Session(list(observers), stop or StopRequest(), began or time.time())
    folder = RunFolder(Path(run) if run is not None else new_run_path(resolved.recipe.name))
    try:
        folder.check_new()
        root = Path(data) if data is not None else None
        SEEN.keep(memory_free()[0] // _SHARE_FOR_FILES)
        session.start.ended("import")
        prepared = prepare(resolved.recipe, root, device, session.emit, None, None, session.stop, session.start.ended)
        folder.create()
        session.stop.begun = True
        text = resolved.as_yaml()
        record_start(folder, prepared, device, text)
        # Last of the three, since it is what makes the folder hold a run: one cut short before is no run, and no dead end
        with write_whole(folder.recipe) as stream:
            stream.write(text.encode())
        return _carry_out(folder, prepared, session, saved=None)
    finally:
        SEEN.forget()
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
    session = Session(list(observers), stop or StopRequest(), began or time.time())
    folder = RunFolder(Path(run))
    try:
        if not folder.holds_a_run():
            raise RecipeError(f"{run} holds no run (it has no recipe.yaml); `fasttrain train` begins one")
        if folder.finished():
            return RunResult(folder.path, json.loads(folder.summary.read_text(encoding="utf-8")), 0)
        folder.claim()
        folder.tidy()
        recipe = resolve(str(folder.recipe)).recipe
        start, plan = read_start(folder)
        chosen = device or start["arguments"]["device"]
        root = Path(data) if data is not None else Path(start["arguments"]["data"])
        if recipe_changed(folder, plan):
            session.emit(
                Message(
                    f"{folder.recipe} is not the recipe that the run began with; what it says now counts", "warning"
                )
            )
        saved = _newest_checkpoint(folder)
        then = start["hardware"]["device_name"]
        SEEN.keep(memory_free()[0] // _SHARE_FOR_FILES)
        session.start.ended("import")
        prepared = prepare(recipe, root, chosen, session.emit, plan, then, session.stop, session.start.ended)
        check_same_cases(plan["cases"], prepared.split, prepared.root)
        if (changed := changed_text(plan.get("case_contents", {}), prepared.contents)) is not None:
            session.emit(Message(changed, "warning"))
        session.stop.begun = True
        _drop_newer_rows(folder, saved, session)
        return _carry_out(folder, prepared, session, saved)
    finally:
        SEEN.forget()
        folder.release()
        session.close()


def _newest_checkpoint(folder: RunFolder) -> ReadCheckpoint | None:
    """The checkpoint to go on from; None where the run ended before its first one. Raises StorageError where those that were
    written are gone or damaged: a run is never begun anew in silence.
    """
    if folder.has_checkpoints():
        saved = newest_good(folder.last, [folder.best, *folder.epoch_files()])
        gone = () if folder.last.exists() else (f"checkpoint {folder.last} is missing",)
        return replace(saved, damaged=(*gone, *saved.damaged))
    if any(entry.get("event") == "CheckpointSaved" for entry in read_events(folder.events)):
        raise StorageError(
            f"{folder.checkpoints} holds no checkpoint, but the run wrote some; bring them back, or begin anew with "
            "`fasttrain train`"
        )
    folder.checkpoints.mkdir(exist_ok=True)
    return None


def _carry_out(folder: RunFolder, prepared: Prepared, session: Session, saved: ReadCheckpoint | None) -> RunResult:
    """Builds and fits; whatever happens, `summary.json` says how it ended."""
    recipe, hardware = prepared.recipe, prepared.hardware
    names = recipe.data.class_names
    session.observers += [MetricsTable(folder.metrics, names, recipe.validation.hd95), EventLog(folder.events)]
    if recipe.output.tensorboard:
        session.observers.append(TensorBoardLog(folder.tensorboard, _first_step(prepared, saved)))
    monitor = DeviceMonitor(hardware.gpu_uuid)
    assembly: Assembly | None = None
    fit: Fit | None = None
    try:
        session.emit(_started(folder, prepared, saved))
        raise_open_file_limit()
        prepare_torch(prepared.plan, hardware)
        session.phases.watch(hardware.torch_device)
        epoch = int(saved.state["progress"]["epoch"]) if saved is not None else 0
        told = lambda text, level: session.emit(Message(text, level))  # noqa: E731
        assembly = build(
            recipe, prepared.plan, hardware, prepared.split, _case_progress(session), told, epoch, session.enter
        )
        SEEN.forget()
        if saved is not None:
            _restore(assembly, saved, session)
        fit = Fit(assembly, recipe, folder, session, monitor)
        _prepare_validation(assembly, prepared, session)
        fit.run()
        return end_run(folder, prepared, session, fit, failure=None)
    except Stopped:
        return end_run(folder, prepared, session, fit, failure=None)
    except BaseException as error:
        known = _explained(error, prepared, session, fit)
        end_run(folder, prepared, session, fit, failure=known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        monitor.close()
        if assembly is not None:
            assembly.close()


def _prepare_validation(assembly: Assembly, prepared: Prepared, session: Session) -> None:
    plan, warn = prepared.plan, lambda text: session.emit(Message(text, "warning"))
    decision = prepare_validation(assembly.validator, plan.step_bytes, plan.cuda_graphs, warn)
    if decision is not None:
        session.emit(Message(f"{decision.name}: {decision.value} ({decision.reason})"))


def _explained(error: BaseException, prepared: Prepared, session: Session, fit: Fit | None) -> FasttrainError | None:
    """The user's sentence, with the phase in which the error came and, on a GPU, what each held."""
    plan, phase = prepared.plan, session.phases.now
    if phase == TRAINING and fit is not None:
        phase = f"training step {fit.progress.step + 1}"
    stitching = stitching_bytes(prepared.recipe, prepared.hardware, plan.sizes)
    state = session.phases.state(session.phases.now, plan.resident_bytes, plan.step_bytes, stitching)
    return explained(error, prepared.recipe, plan.workers, state, phase, plan.activation_checkpointing)


def _case_progress(session: Session) -> Callable[[str, int, int], None]:
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
        skipped_cases=tuple(prepared.skipped),
        outline=prepared.outline.text,
    )


def _restore(assembly: Assembly, saved: ReadCheckpoint, session: Session) -> None:
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


def _drop_newer_rows(folder: RunFolder, saved: ReadCheckpoint | None, session: Session) -> None:
    """Before the table is opened: rows newer than the checkpoint belong to steps that are taken again."""
    progress = saved.state["progress"] if saved is not None else {"step": 0, "step_in_epoch": 0, "epoch": 0}
    drop_pictures(folder.pictures, progress["epoch"] + 1)
    # A row of the epoch that is open was written just before a kill, its checkpoint not: that epoch is closed again
    drop_rows_after(folder.metrics, progress["step"] - (1 if progress["step_in_epoch"] else 0))
    rows = len(read_metrics(folder.metrics))
    if rows < progress["epoch"]:
        told = f"{folder.metrics} has {counted(rows, 'row')} for {counted(progress['epoch'], 'epoch')}"
        session.emit(Message(f"{told}: the others were lost, and are not made anew", "warning"))


def _first_step(prepared: Prepared, saved: ReadCheckpoint | None) -> int:
    """The first step whose figures are logged again: the last one too where it ends an epoch that is closed again."""
    if saved is None:
        return 0
    progress = saved.state["progress"]
    return int(progress["step"]) + (progress["step_in_epoch"] < prepared.plan.sizes.steps_per_epoch)
