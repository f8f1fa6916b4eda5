"""Owns a run from first to last: folder, plan, assembly, fit, end; the same for the command line and for Python."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.checkpoints import ReadCheckpoint
from fasttrain.data.seen_files import SEEN
from fasttrain.data.splits import Split
from fasttrain.engine.attempt import Attempt, explained_in
from fasttrain.engine.checkpoint_space import check_space
from fasttrain.engine.ending import RunResult, end_run, end_spent, resume_line
from fasttrain.engine.limits import Limits, goes_beyond, spent_before, told_of_limits
from fasttrain.engine.planning.batch_policy import stepped_down, told_of_ranks, with_ranks
from fasttrain.engine.preparing import Prepared, prepare, read_start, record_start
from fasttrain.engine.resuming.changes import as_values
from fasttrain.engine.resuming.going_on import GoingOn, look_at
from fasttrain.engine.second_try import as_former, free_memory, save_where_it_was, told_of_second_try
from fasttrain.engine.session import Session
from fasttrain.engine.sound_cases import changed_text, check_same_cases
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import OutOfMemoryError, RecipeError
from fasttrain.machine.limits import memory_free
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.recipe import Recipe, ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import make_new_run_path, new_run_path
from fasttrain.telemetry.attempts import known_attempts, read_attempts
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.event_log import EventLog
from fasttrain.telemetry.events import Message, Observer, RunStarted
from fasttrain.telemetry.metrics_csv import MetricsTable, drop_rows_after, read_metrics
from fasttrain.telemetry.pictures import drop_pictures
from fasttrain.telemetry.tensorboard import TensorBoardLog
from fasttrain.whole_files import write_whole
from fasttrain.wording import counted

_SHARE_FOR_FILES = 8
"""One part in so many of the free memory may hold files that the check read until the cache is made of them."""

__all__ = ["Prepared", "RunResult", "prepare", "resume", "train", "with_ranks"]


def train(
    recipe: ResolvedRecipe | str,
    *,
    data: Path | str | None = None,
    run: Path | str | None = None,
    device: str = "auto",
    observers: Sequence[Observer] = (),
    stop: StopRequest | None = None,
    began: float | None = None,
    limits: Limits | None = None,
    asked: Recipe | None = None,
    paid_since: float | None = None,
    ranks: Ranks = ONLY_ONE,
    former: tuple[Mapping[str, Any], str] | None = None,
) -> RunResult:
    """Trains a recipe (a name, a file, or one from `load_recipe`) in a new run folder and returns how it ended.

    data: the folder of the set, else `$FASTTRAIN_DATA/NAME` or `./data/NAME`. run: the new folder, else
    `./runs/NAME-TIMESTAMP`. device: `auto`, `cpu`, `cuda` or `cuda:N`. observers: told of everything that happens. began:
    when the process began, for the time to the first step (Unix seconds). limits: where the run ends before its last epoch,
    counted from `began`, or from `paid_since` where the process did other work before (tuning). asked: the recipe as the command
    gave it, where what is trained was tuned since: by it a command that is given again is known. ranks: the processes that train
    together, of which this is the first. former: the plan of another run of the same shapes and the name of its device, whose
    measured choices stand. Raises FasttrainError of the kind that fits, and Stopped where `stop` was asked for while cases were
    checked or the plan was made: there is no run yet.
    """
    resolved = resolve(recipe) if isinstance(recipe, str) else recipe
    session = Session(
        list(observers),
        stop or StopRequest(),
        began or time.time(),
        limits or Limits(),
        paid_since=paid_since,
        ranks=ranks,
    )
    asked = asked or resolved.recipe
    alone, resolved = resolved, with_ranks(resolved, ranks.place.ranks)
    folder = RunFolder(Path(run) if run is not None else new_run_path(resolved.recipe.name))
    try:
        session.limits.check_score(resolved.recipe.task_facts)
        session.heed_limits()
        folder.check_new()
        root = Path(data) if data is not None else None
        SEEN.keep(memory_free()[0] // _SHARE_FOR_FILES)
        session.start.ended("import")
        with session.stop.at_rest():
            prepared = prepare(
                resolved.recipe,
                root,
                device,
                session.emit,
                None if former is None else former[0],
                None if former is None else former[1],
                session.stop,
                session.start.ended,
                _all_of,
                ranks.place,
            )
            session.ahead = prepared.ahead
        check_space(folder, resolved.recipe, prepared.outline.parameters)
        if run is None:
            # Another run may have begun in the same second
            folder = RunFolder(make_new_run_path(resolved.recipe.name, folder.path))
        folder.create()
        session.stop.begun = True
        text = resolved.as_yaml()
        record_start(folder, prepared, device, text, as_values(asked))
        # Last of the three, since it is what makes the folder hold a run: one cut short before is no run, and no dead end
        with write_whole(folder.recipe) as stream:
            stream.write(text.encode())
        session.stop.goes_on_with = resume_line(folder, session)
        _tell_of_ranks(session, alone, resolved)
        return _carry_out(folder, prepared, session, None, _smaller(resolved, ranks))
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
    limits: Limits | None = None,
    asked_for: bool = True,
    assignments: Sequence[str] | Mapping[str, Any] = (),
    asked: Recipe | None = None,
    ranks: Ranks = ONLY_ONE,
) -> RunResult:
    """Goes on with a run from its newest sound checkpoint, exactly as if it had not been interrupted.

    assignments: values of the recipe (`key.path=value`) that are others from here on; asked: the recipe as a command gives it
    anew, for the record. data, device: others than the run was last at work with. A finished run is left as it is unless
    something is set, or a limit ended it and the limits given now are wider; whether more hours are, is for whoever `asked_for`
    it (`limits.goes_beyond`). A run that was interrupted before its first checkpoint begins again from step 0, which is the same.

    Raises RecipeError where `run` holds no run, or what is set cannot be changed or leaves nothing to train; DataError where the
    cases are no longer the same; StorageError where checkpoints were written and none is sound. The run is then as it was.
    """
    folder = RunFolder(Path(run))
    limits = limits or Limits()
    told, earlier = read_attempts(folder.events), known_attempts(folder.events, folder.read_summary())
    session = Session(list(observers), stop or StopRequest(), began or time.time(), limits, earlier, ranks=ranks)
    try:
        if not folder.holds_a_run():
            raise RecipeError(f"{run} holds no run (it has no recipe.yaml); `fasttrain train` begins one")
        if folder.finished() and not assignments and not goes_beyond(limits, folder.read_summary(), asked_for):
            return RunResult(folder.path, json.loads(folder.summary.read_text(encoding="utf-8")), 0)
        session.stop.goes_on_with = resume_line(folder, session)
        # Before anything is written: a run that cannot go on stays as it is
        held = folder.checkpoints_written()
        going = look_at(folder, assignments, asked, ranks.place.ranks)
        limits.check_score(going.resolved.recipe.task_facts)
        folder.claim()
        if folder.checkpoints_written() != held:
            going = look_at(folder, assignments, asked, ranks.place.ranks)
        if len(told) < len(earlier):
            text = (
                f"{folder.events} does not tell of all that the run took: what {folder.summary} knows of it counts too"
            )
            session.emit(Message(text, "warning"))
        if (over := spent_before(limits, session.account)) is not None:
            return end_spent(folder, session, going, *over)
        session.heed_limits()
        folder.tidy()
        root = going.data_folder(Path(data) if data is not None else None, session.emit)
        chosen = device or going.start["arguments"]["device"]
        SEEN.keep(memory_free()[0] // _SHARE_FOR_FILES)
        session.start.ended("import")
        then = going.device_of_choices
        with session.stop.at_rest():
            recipe, ended = going.resolved.recipe, session.start.ended
            prepared = prepare(
                recipe, root, chosen, session.emit, going.plan, then, session.stop, ended, _all_of, ranks.place
            )
            session.ahead = prepared.ahead
        check_space(folder, going.resolved.recipe, prepared.outline.parameters)
        check_same_cases(going.plan["cases"], prepared.split, prepared.root)
        if (changed := changed_text(going.plan.get("case_contents", {}), prepared.contents)) is not None:
            session.emit(Message(changed, "warning"))
        going.check_order(prepared)
        session.stop.begun = True
        _drop_newer_rows(folder, going.saved, session)
        return _carry_out(folder, prepared, session, going, _smaller(going.resolved, ranks))
    finally:
        SEEN.forget()
        folder.release()
        session.close()


def _smaller(resolved: ResolvedRecipe, ranks: Ranks) -> ResolvedRecipe | None:
    """What is trained where memory runs out early. Where one of several ranks runs out of it, the others wait for it in the
    middle of a step: they can only end.
    """
    return stepped_down(resolved) if ranks.place.alone else None


def _tell_of_ranks(session: Session, alone: ResolvedRecipe, resolved: ResolvedRecipe) -> None:
    if not session.ranks.place.alone:
        session.emit(Message(told_of_ranks(alone, resolved, session.ranks.place.ranks)))


def _all_of(split: Split) -> Split:
    """A run opens every case of both parts."""
    return split


def _carry_out(
    folder: RunFolder,
    prepared: Prepared,
    session: Session,
    going: GoingOn | None,
    smaller: ResolvedRecipe | None,
) -> RunResult:
    """Builds and fits; whatever happens, `summary.json` says how it ended.

    smaller: what is trained instead where memory runs out in the first steps; None: there is nothing smaller.
    """
    recipe, hardware = prepared.recipe, prepared.hardware
    saved = going.saved if going is not None else None
    names = recipe.data.scored_names
    session.observers += [
        MetricsTable(folder.metrics, names, recipe.validation.hd95, recipe.task, recipe.data.slices is not None),
        EventLog(folder.events),
    ]
    if recipe.output.tensorboard:
        session.observers.append(TensorBoardLog(folder.tensorboard, _first_step(prepared, saved)))
    attempt = Attempt(folder, session, DeviceMonitor(hardware.gpu_uuid), going)
    try:
        session.emit(_started(folder, prepared, session, saved))
        raise_open_file_limit()
        with session.ranks.ended_by(lambda lost: end_run(folder, prepared, session, attempt.fit, saved, lost)):
            short = attempt.run(prepared, forgiving=smaller is not None)
        if short is not None and smaller is not None:
            attempt.close()
            session.emit(told_of_second_try(recipe.training, smaller.recipe.training, short))
            prepared = _prepared_again(folder, prepared, smaller, session)
            attempt.run(prepared)
        return end_run(folder, prepared, session, attempt.fit, saved, failure=None)
    except Stopped:
        return end_run(folder, prepared, session, attempt.fit, saved, failure=None)
    except BaseException as error:
        known = explained_in(error, prepared, session, attempt.fit)
        if isinstance(known, OutOfMemoryError):
            save_where_it_was(error, attempt.fit, session)
        end_run(folder, prepared, session, attempt.fit, saved, failure=known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        with session.stop.at_rest():
            attempt.close()
            attempt.monitor.close()


def _prepared_again(folder: RunFolder, former: Prepared, smaller: ResolvedRecipe, session: Session) -> Prepared:
    """The run with another batch, decided and recorded as if it had begun so; what else was chosen for the device stands."""
    free_memory()
    start, plan = read_start(folder)
    hardware, asked = former.hardware, plan.get("asked")
    plan = as_former({**plan, **former.plan.record()})
    prepared = prepare(
        smaller.recipe, former.root, hardware.device, session.emit, plan, hardware.device_name, session.stop
    )
    text = smaller.as_yaml()
    record_start(folder, prepared, start["arguments"]["device"], text, asked)
    with write_whole(folder.recipe) as stream:
        stream.write(text.encode())
    return prepared


def _started(folder: RunFolder, prepared: Prepared, session: Session, saved: ReadCheckpoint | None) -> RunStarted:
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
        began=session.account.began,
        price_per_hour=session.limits.price_per_hour,
        limits=told_of_limits(session.limits, session.account),
        earlier_seconds=session.account.earlier_hours * 3600,
        earlier_cost=session.account.earlier_cost,
        limit_options=(session.limits.whole or session.limits).options.strip(),
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
    steps = progress.get("epoch_steps") or prepared.plan.sizes.steps_per_epoch
    return int(progress["step"]) + (progress["step_in_epoch"] < steps)
