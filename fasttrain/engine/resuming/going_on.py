"""Owns a run that goes on: what is found in its folder, whether it may go on as asked, how it is taken up and recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fasttrain.checkpoints import ReadCheckpoint, furthest_good
from fasttrain.data.location import data_root, usual_folder
from fasttrain.engine.build import Assembly
from fasttrain.engine.outline import layers_of
from fasttrain.engine.planning.batch_policy import with_ranks
from fasttrain.engine.preparing import Prepared, read_start, recipe_changed, record_start
from fasttrain.engine.resuming import told
from fasttrain.engine.resuming.best_kept import settle_best
from fasttrain.engine.resuming.carrying_on import carry_on, known_since
from fasttrain.engine.resuming.changes import Change, as_values, changed_recipe, changes_between, check_changes
from fasttrain.engine.state import check_layers
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe import Recipe, ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.event_log import last_events, read_events
from fasttrain.telemetry.events import Event, Message
from fasttrain.telemetry.metrics_csv import read_metrics
from fasttrain.whole_files import write_json, write_whole
from fasttrain.wording import counted

Assignments = Sequence[str] | Mapping[str, Any]


@dataclass
class GoingOn:
    """A run to go on with.

    changes: of the recipe since the run was last at work, in its file (`edited`) or by what is set now (`set_anew`). asked: the
    recipe as the run's command gave it, where that is known. reached: the step and the epoch that it is known to have come to.
    """

    folder: RunFolder
    resolved: ResolvedRecipe
    start: dict[str, Any]
    plan: dict[str, Any]
    saved: ReadCheckpoint | None
    changes: list[Change]
    edited: bool
    set_anew: bool
    asked: dict[str, Any] | None
    reached: tuple[int, int] = (0, 0)
    _recorded: bool = field(default=False, init=False)

    @property
    def device_then(self) -> str:
        """The name of the device that the run was on."""
        return str(self.start["hardware"]["device_name"])

    @property
    def device_of_choices(self) -> str | None:
        """The device for which precision and layout stand as they were chosen; None where a GPU's step now holds more or less of
        its memory, so that they are to be measured anew.
        """
        resized = {change.key for change in self.changes} & {"training.batch_size", "patch.size", "data.storage_dtype"}
        return None if resized and str(self.start["hardware"].get("device")).startswith("cuda") else self.device_then

    def data_folder(self, given: Path | None, emit: Callable[[Event], None]) -> Path:
        """Where the cases are: what was given, else where the run found them, else where the recipe's set usually is.

        Raises DataError where it is in none of them.
        """
        if given is not None:
            return given
        former = Path(self.start["arguments"]["data"])
        if former.is_dir():
            return former
        recipe = self.resolved.recipe
        usual, origin = usual_folder(recipe.data_name, os.environ)
        try:
            found = data_root(recipe, None, os.environ)
        except DataError as error:
            raise DataError(
                f"the cases of {self.folder.path} are no more at {former}, and not at {usual.absolute()} (from {origin}) either; "
                "name their folder with --data"
            ) from error
        emit(Message(f"{former} is not there; the cases are taken from {found.absolute()} (from {origin})", "warning"))
        return found

    def check_order(self, prepared: Prepared) -> None:
        """Raises RecipeError where another batch or number of ranks would give a `smart` cache another order of cases."""
        if self.saved is None or prepared.plan.cache != "smart":
            return
        then, now = self.plan["sizes"], prepared.plan.sizes
        lengths = [
            int(then["steps_per_epoch"]) * int(then["effective_batch"]),
            now.steps_per_epoch * now.effective_batch,
        ]
        if then["effective_batch"] != now.effective_batch or lengths[0] != lengths[1]:
            raise RecipeError(
                f"an effective batch of {now.effective_batch} instead of {then['effective_batch']}: with data.cache.kind: smart "
                "the cases of an epoch hang on its length; leave training.batch_size and the like as they were"
            )
        if (former := int(then.get("ranks", 1))) != now.ranks:
            raise RecipeError(
                f"{counted(now.ranks, 'rank')} instead of {former}: with data.cache.kind: smart each has cases of its own; go on "
                f"with {counted(former, 'rank')} (--gpus {former})"
            )

    def take_up(self, assembly: Assembly, prepared: Prepared, emit: Callable[[Event], None]) -> None:
        """Brings the parts of the run to where its checkpoint is, says what that gave back, and records how it goes on.

        Raises RecipeError and StorageError as `TrainState.restore`.
        """
        if self.edited:
            text = f"{self.folder.recipe} is not the recipe that the run began with; what it says now counts"
            emit(Message(text, "warning"))
        if self.changes:
            emit(Message(told.changes_text(self.changes)))
        if self.saved is not None:
            self._restore(assembly, prepared, self.saved, emit)
        elif self.reached[0]:
            text = f"no checkpoint was written yet: all {counted(self.reached[0], 'step')} are taken again, with the same draws"
            emit(Message(text))
        else:
            emit(Message("no step was taken yet: the run begins with its first"))
        self._record(prepared)

    def _restore(
        self, assembly: Assembly, prepared: Prepared, saved: ReadCheckpoint, emit: Callable[[Event], None]
    ) -> None:
        trainer, recipe, sizes = assembly.trainer, prepared.recipe, prepared.plan.sizes
        assembly.state.restore(saved.state, str(saved.path))
        progress = assembly.state.progress
        known_since(progress, self.plan.get("sizes") or asdict(sizes), trainer.rate)
        self._tell_damaged(saved, emit)
        for text in settle_best(self.folder, progress, saved):
            emit(Message(text, "warning"))
        before = replace(progress)
        carry_on(progress, sizes)
        emit(Message(told.restored_text(saved.state, progress, saved.path.name, assembly.state.step, recipe)))
        missing = told.not_restored(saved.state, assembly.state.step, self.reached[0])
        emit(Message(f"not restored: {'; '.join(missing) or 'nothing, all of it was taken up'}"))
        other = told.other_device_text(self.device_then, prepared.hardware.device_name, self.plan, prepared.plan)
        if other is not None:
            emit(Message(other, "warning"))
        batch = told.batch_text(before, progress, recipe, sizes.steps_per_epoch)
        if batch is not None:
            emit(Message(batch))
        if (batch is not None or self.changes) and progress.step:
            rate = trainer.rate(trainer.scheduled_step) * progress.rate_factor
            emit(
                Message(told.rate_text(before.learning_rate, rate, recipe, sizes.total_steps - trainer.scheduled_step))
            )

    def _tell_damaged(self, saved: ReadCheckpoint, emit: Callable[[Event], None]) -> None:
        if not saved.damaged:
            return
        for sentence in saved.damaged:
            emit(Message(sentence, "warning"))
        epoch, step = saved.state["progress"]["epoch"], saved.state["progress"]["step"]
        reached = self.reached[1]
        if saved.path == self.folder.last and reached <= epoch:
            # The damage is in one that would have been of no use
            return
        lost = "what came after it is trained again"
        if reached > epoch:
            which = f"epoch {reached} is" if reached == epoch + 1 else f"epochs {epoch + 1} to {reached} are"
            lost = f"{which} lost and trained again"
        text = f"going on from {saved.path.name}, which holds epoch {epoch}, step {step}; {lost}"
        emit(Message(text, "warning"))

    def _record(self, prepared: Prepared) -> None:
        """Only now, when nothing can be refused any more; once, since a second try has records of its own."""
        if self._recorded:
            return
        self._recorded = True
        self.folder.reopen()
        text = self.folder.recipe.read_text(encoding="utf-8")
        if self.set_anew:
            text = self.resolved.as_yaml()
            with write_whole(self.folder.recipe) as stream:
                stream.write(text.encode())
        arguments = {**self.start["arguments"], "data": str(prepared.root.absolute())}
        ranks = (self.plan.get("sizes") or {}).get("ranks", 1)
        other = ranks != prepared.plan.sizes.ranks
        if self.changes or self.edited or other or self.device_then != prepared.hardware.device_name:
            contents = {**prepared.contents, **self.plan.get("case_contents", {})}
            record_start(self.folder, replace(prepared, contents=contents), arguments["device"], text, self.asked)
            return
        # What was decided and measured when the run began is worth more than that it still stands
        if arguments != self.start["arguments"]:
            write_json(self.folder.environment, {**self.start, "arguments": arguments})
        if self.asked != self.plan.get("asked"):
            write_json(self.folder.plan, {**self.plan, "asked": self.asked})


def look_at(folder: RunFolder, assignments: Assignments = (), asked: Recipe | None = None, ranks: int = 1) -> GoingOn:
    """What there is to go on with, on so many `ranks`. asked: the recipe that a command gives anew (`train --resume auto`).

    Raises RecipeError with everything in the recipe that may not change, layer by layer where the network is another, and where
    nothing would be left to train; StorageError where checkpoints were written and none is sound.
    """
    start, plan = read_start(folder)
    there = resolve(str(folder.recipe)).recipe
    before = (plan.get("sizes") or {}).get("ranks", 1)
    resolved = with_ranks(changed_recipe(str(folder.recipe), assignments), ranks, before)
    then, edited = plan.get("recipe") or as_values(there), recipe_changed(folder, plan)
    changes = changes_between(then, as_values(resolved.recipe))
    saved = newest_checkpoint(folder)
    when = (
        f"recipe {asked.name} of this command:"
        if asked is not None
        else "--set"
        if assignments
        else f"{folder.recipe}:"
    )
    _check_recipe(changes, resolved.recipe, saved, when)
    _check_unfinished(folder, resolved.recipe, saved)
    kept = as_values(asked) if asked is not None else plan.get("asked")
    anew = bool(assignments) or ranks != before
    return GoingOn(folder, resolved, start, plan, saved, changes, edited, anew, kept, _reached(folder))


def newest_checkpoint(folder: RunFolder) -> ReadCheckpoint | None:
    """The checkpoint to go on from; None where the run ended before its first one. Raises StorageError where those that were
    written are gone or damaged: a run is never begun anew in silence.
    """
    if folder.has_checkpoints():
        saved = furthest_good(folder.last, [folder.best, *folder.epoch_files()])
        gone = not folder.last.exists() and _was_saved(folder, folder.last.name)
        return replace(saved, damaged=(*([f"checkpoint {folder.last} is missing"] if gone else []), *saved.damaged))
    if (proof := _proof_of_checkpoints(folder)) is not None:
        raise StorageError(
            f"{folder.checkpoints} holds no checkpoint, but {proof}; bring them back, or begin anew with `fasttrain train`"
        )
    folder.checkpoints.mkdir(exist_ok=True)
    return None


def _was_saved(folder: RunFolder, name: str) -> bool:
    return any(
        entry.get("event") == "CheckpointSaved" and Path(str(entry.get("path"))).name == name
        for entry in read_events(folder.events)
    )


def _proof_of_checkpoints(folder: RunFolder) -> str | None:
    """What tells that the run wrote checkpoints, in words; None where it was cut short before its first one."""
    seen: set[float | None] = set()
    for entry in read_events(folder.events):
        if entry.get("event") == "CheckpointSaved":
            return "the run wrote some"
        if entry.get("event") == "EpochEnded":
            seen.add(_count(entry.get("epoch")))
    if isinstance(folder.read_summary().get("checkpoint"), dict):
        return f"{folder.summary} tells of one"
    # An epoch that the log knows was closed without one; of another nobody can say
    unknown = [row for row in read_metrics(folder.metrics) if row.get("epoch") not in seen]
    if not unknown:
        return None
    epochs = counted(len(unknown), "epoch")
    return f"{folder.metrics} tells of {epochs} that {folder.events} knows nothing of, and that checkpoints were written of"


def _check_recipe(changes: list[Change], recipe: Recipe, saved: ReadCheckpoint | None, when: str) -> None:
    if not changes:
        return
    faults: list[str] = []
    for check in (
        lambda: check_changes(changes, when),
        lambda: None if saved is None else check_layers(layers_of(recipe), saved.state["network"], saved.path.name),
    ):
        try:
            check()
        except RecipeError as error:
            faults += error.faults
    if faults:
        raise RecipeError(faults)


def _check_unfinished(folder: RunFolder, recipe: Recipe, saved: ReadCheckpoint | None) -> None:
    if saved is None:
        return
    progress, training = saved.state["progress"], recipe.training
    done, finished = int(progress["epoch"]), folder.finished()
    if done > training.epochs or (finished and done == training.epochs):
        raise RecipeError(
            f"training.epochs {training.epochs}: {folder.path} has trained {counted(done, 'epoch')} already; set it above that"
        )
    stopping = training.early_stopping
    if finished and stopping is not None and progress["stopping_waited"] >= stopping.patience:
        raise RecipeError(
            f"{folder.path} was ended by early stopping after epoch {done}, {counted(progress['stopping_waited'], 'validation')} "
            "without a better score; to go on, set training.early_stopping=null or a larger training.early_stopping.patience"
        )


def _reached(folder: RunFolder) -> tuple[int, int]:
    """What is known of the run's last session, by its last events."""
    step, epoch = 0, 0
    for entry in last_events(folder.events):
        if entry.get("event") == "RunStarted":
            step, epoch = _count(entry.get("resumed_step")), 0
        if entry.get("event") in ("StepLogged", "EpochEnded"):
            step = max(step, _count(entry.get("step")))
        if entry.get("event") == "EpochEnded":
            epoch = _count(entry.get("epoch"))
    return step, epoch


def _count(value: object) -> int:
    """Of an event that anybody may have edited: 0 for what is no count."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
