"""Owns a run from first to last: folder, plan, assembly, fit, end; the same for the command line and for Python."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fasttrain.checkpoints import ReadCheckpoint, newest_good
from fasttrain.data.seen_files import SEEN
from fasttrain.engine.attempt import Attempt, explained_in
from fasttrain.engine.ending import RunResult, end_run
from fasttrain.engine.planning.batch_policy import stepped_down
from fasttrain.engine.preparing import Prepared, prepare, read_start, recipe_changed, record_start
from fasttrain.engine.second_try import as_former, free_memory, save_where_it_was, told_of_second_try
from fasttrain.engine.session import Session
from fasttrain.engine.sound_cases import changed_text, check_same_cases
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import OutOfMemoryError, RecipeError, StorageError
from fasttrain.machine.limits import memory_free
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder, new_run_path, write_whole
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.event_log import EventLog, read_events
from fasttrain.telemetry.events import Message, Observer, RunStarted
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
        return _carry_out(folder, prepared, session, None, stepped_down(resolved))
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
        resolved = resolve(str(folder.recipe))
        recipe = resolved.recipe
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
        return _carry_out(folder, prepared, session, saved, stepped_down(resolved))
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


def _carry_out(
    folder: RunFolder,
    prepared: Prepared,
    session: Session,
    saved: ReadCheckpoint | None,
    smaller: ResolvedRecipe | None,
) -> RunResult:
    """Builds and fits; whatever happens, `summary.json` says how it ended.

    smaller: what is trained instead where memory runs out in the first steps; None: there is nothing smaller.
    """
    recipe, hardware = prepared.recipe, prepared.hardware
    names = recipe.data.class_names
    session.observers += [
        MetricsTable(folder.metrics, names, recipe.validation.hd95, recipe.task),
        EventLog(folder.events),
    ]
    if recipe.output.tensorboard:
        session.observers.append(TensorBoardLog(folder.tensorboard, _first_step(prepared, saved)))
    attempt = Attempt(folder, session, DeviceMonitor(hardware.gpu_uuid), saved)
    try:
        session.emit(_started(folder, prepared, saved))
        raise_open_file_limit()
        short = attempt.run(prepared, forgiving=smaller is not None)
        if short is not None and smaller is not None:
            attempt.close()
            session.emit(told_of_second_try(recipe.training, smaller.recipe.training, short))
            prepared = _prepared_again(folder, prepared, smaller, session)
            attempt.run(prepared)
        return end_run(folder, prepared, session, attempt.fit, failure=None)
    except Stopped:
        return end_run(folder, prepared, session, attempt.fit, failure=None)
    except BaseException as error:
        known = explained_in(error, prepared, session, attempt.fit)
        if isinstance(known, OutOfMemoryError):
            save_where_it_was(error, attempt.fit, session)
        end_run(folder, prepared, session, attempt.fit, failure=known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        attempt.close()
        attempt.monitor.close()


def _prepared_again(folder: RunFolder, former: Prepared, smaller: ResolvedRecipe, session: Session) -> Prepared:
    """The run with another batch, decided and recorded as if it had begun so; what else was chosen for the device stands."""
    free_memory()
    start, plan = read_start(folder)
    hardware = former.hardware
    plan = as_former({**plan, **former.plan.record()})
    prepared = prepare(
        smaller.recipe, former.root, hardware.device, session.emit, plan, hardware.device_name, session.stop
    )
    text = smaller.as_yaml()
    record_start(folder, prepared, start["arguments"]["device"], text)
    with write_whole(folder.recipe) as stream:
        stream.write(text.encode())
    return prepared


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
