"""Owns the course of a run from one checkpointed state to its end: epochs, validation, checkpoints, stopping."""

from __future__ import annotations

import contextlib
import math
import time

from fasttrain.engine.build import Assembly
from fasttrain.engine.former_scores import former_scores
from fasttrain.engine.optimisation.patience import lower_rate, out_of_patience
from fasttrain.engine.phases import FIRST_STEP, TRAINING, VALIDATION
from fasttrain.engine.saving import Saver
from fasttrain.engine.saving_elsewhere import SavedElsewhere
from fasttrain.engine.session import Session
from fasttrain.engine.stop import Stopped
from fasttrain.engine.trainer import StepReport
from fasttrain.engine.validating.expected import validation_in_steps
from fasttrain.engine.validating.pictures import Pictures
from fasttrain.engine.validating.validation import Scores
from fasttrain.errors import EXIT_DONE, DataError, DivergedError
from fasttrain.recipe import Recipe
from fasttrain.recipe.training_spec import EarlyStoppingSpec, PlateauSchedule
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.clock import TimeLeft
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.events import EpochEnded, FirstStep, Message, Progress, StepLogged, ValidationFigures
from fasttrain.wording import counted


class Fit:
    """Trains what an Assembly holds until the last epoch or until it is asked to stop.

    folder: None in a rank that writes nothing.
    """

    def __init__(
        self,
        assembly: Assembly,
        recipe: Recipe,
        folder: RunFolder | None,
        session: Session,
        monitor: DeviceMonitor,
    ) -> None:
        self.assembly = assembly
        self.recipe = recipe
        self.session = session
        self.emit = session.emit
        self.stop = session.stop
        self.monitor = monitor
        self.trainer = assembly.trainer
        self.progress = assembly.state.progress
        self._earlier_seconds = self.progress.total_seconds
        self.saver: Saver | SavedElsewhere = (
            Saver(folder, recipe.output, assembly.state, session.emit, self.total_seconds)
            if folder is not None
            else SavedElsewhere()
        )
        self.folder = folder
        self.time_left = TimeLeft(recipe.training.epochs, self.trainer.steps_per_epoch, recipe.validation.every)
        self.pictures = (
            Pictures(folder.pictures, recipe, assembly.validator, session.emit, session.stop)
            if folder is not None
            else None
        )
        self.last_scores: Scores | None = None
        self.scored = True
        """False where a stop came before the scores that a kill had lost were there again."""
        self._validation_expected = False
        self._validation_seconds = 0.0

    def run(self) -> None:
        """Returns after the last epoch, or with a checkpoint of where it was when `stop` was asked for.

        Raises DivergedError, StorageError, DataError and MachineError as they come; the newest checkpoint stands.
        """
        try:
            self._end_where_over()
            while self.progress.epoch < self.recipe.training.epochs and not self.session.ends_here(at_once=True):
                if not self._train_epoch() or not self._close_epoch():
                    break
            if self.progress.epoch < self.recipe.training.epochs:
                self.trainer.settle()
                self.saver.save_last()
        except BaseException as error:
            self.saver.close()
            if isinstance(error, DivergedError):
                raise DivergedError(f"{error}; {self.saver.standing()}") from error
            raise
        self.saver.finish()

    def total_seconds(self) -> float:
        """Of this session and, up to their last checkpoints, of those before it."""
        return self._earlier_seconds + time.time() - self.session.began

    def seconds_left(self) -> float | None:
        """Until the last epoch is over, validations counted in; None before a step was measured."""
        if not self._validation_expected:
            self._validation_expected = True
            # Read anew, and a file that has gone since then is no reason not to train
            with contextlib.suppress(DataError, OSError):
                self.time_left.expect_validation(validation_in_steps(self.assembly.validator.cases, self.recipe))
        return self.time_left.seconds_left(self.trainer.scheduled_step)

    def _end_where_over(self) -> None:
        """A run may be where it should end: of one that was killed before it had its summary the cases' scores are lost."""
        progress, stopping = self.progress, self.recipe.training.early_stopping
        between = progress.epoch > 0 and progress.step_in_epoch == 0
        impatient = stopping is not None and between and progress.stopping_waited >= stopping.patience
        reached = self.session.limits.reached_by(progress.best_value, self.recipe.task_facts) is not None
        over = reached or impatient or progress.epoch >= self.recipe.training.epochs
        lost = self.folder is not None and over and between and not former_scores(self.folder, progress.step)
        if self.session.ranks.share(lost):
            self._score_again()
        if stopping is not None and impatient:
            self.stop.ask(_out_of_patience_text(stopping), EXIT_DONE)
        self._stop_where_reached(progress.best_value)

    def _score_again(self) -> None:
        self.emit(
            Message(f"the scores of the cases after epoch {self.progress.epoch} were lost: they are validated again")
        )
        try:
            with self.stop.at_rest():
                figures = self._validate()
        except Stopped:
            self.scored = False
            return
        if self._is_best(figures):
            self.progress.best_value, self.progress.best_epoch = figures.headline, self.progress.epoch
            self.saver.save_epoch(is_best=True, is_last=True)

    def _train_epoch(self) -> bool:
        """The rest of the open epoch; False where a stop was asked for."""
        self.session.enter(TRAINING if self.session.start.over else FIRST_STEP)
        rest = contextlib.ExitStack()
        if not self.session.start.over:
            # The first step may compile for a minute, and there is nothing yet that a checkpoint lacks
            rest.enter_context(self.stop.at_rest())
        with rest:
            return self._train_steps(rest)

    def _train_steps(self, rest: contextlib.ExitStack) -> bool:
        window = _Window()
        for report in self.trainer.steps():
            rest.close()
            if not self.session.start.over:
                self.session.enter(TRAINING)
                self.emit(FirstStep(self.session.start.total or 0.0, self.session.start.seconds))
            if self.trainer.step.warning is not None:
                # Of the first step where compiling failed, of a later one where recording did
                self.emit(Message(self.trainer.step.warning, "warning"))
                self.trainer.step.warning = None
            window.add(report)
            if report.step % self.recipe.output.log_every == 0:
                self._log(report, window)
                window = _Window()
            if self.session.ends_here():
                return False
            if report.step_in_epoch < self.trainer.steps_in_epoch and self.saver.due_within_epoch():
                self.trainer.settle()
                self.saver.renew_last()
            self.saver.poll()
        return not self.session.ends_here(at_once=True)

    def _log(self, report: StepReport, window: _Window) -> None:
        self.trainer.settle()
        reading = self.monitor.read()
        self.time_left.add_steps(window.steps, window.seconds)
        left = self.seconds_left()
        hours, cost = self.session.account.projected(left)
        self.emit(
            StepLogged(
                epoch=report.epoch,
                step=report.step,
                step_in_epoch=report.step_in_epoch,
                loss=float(report.loss),
                learning_rate=report.learning_rate,
                patches_per_second=window.patches_per_second,
                wait_share=window.wait_share,
                gpu_utilisation=reading.utilisation,
                gpu_gib=reading.gib,
                seconds_left=left,
                projected_hours=hours,
                projected_cost=cost,
            )
        )

    def _close_epoch(self) -> bool:
        """Validates where that is due and writes the epoch's row and checkpoints; False where a stop was asked for before
        the epoch counted as closed, so that a resume closes it again.
        """
        progress, epoch = self.progress, self.progress.epoch + 1
        train_loss = self.trainer.settle()
        last = epoch == self.recipe.training.epochs
        if last:
            self.trainer.check_last_epoch()
        figures = None
        if last or epoch % self.recipe.validation.every == 0:
            if self.saver.due_before_validation(self._validation_seconds):
                # The steps of a whole epoch are not lost to what may take longer than they did
                self.saver.renew_last()
            try:
                with self.stop.at_rest(self.saver.save_beside):
                    figures = self._validate()
            except Stopped:
                return False
        if figures is not None and self.saver.lost_best():
            progress.best_value = progress.best_epoch = None
        is_best = self._is_best(figures)
        if is_best and figures is not None:
            progress.best_value, progress.best_epoch = figures.headline, epoch
        seconds = progress.epoch_seconds
        patches = progress.position - progress.epoch_first
        reading = self.monitor.read()
        left = self.seconds_left()
        hours, cost = self.session.account.projected(left)
        row = EpochEnded(
            epoch=epoch,
            step=progress.step,
            seconds=seconds,
            train_loss=train_loss,
            learning_rate=progress.learning_rate,
            patches_per_second=patches / seconds if seconds else 0.0,
            wait_share=min(progress.epoch_wait_seconds / seconds, 1.0) if seconds else 0.0,
            gpu_utilisation=reading.utilisation,
            gpu_gib=reading.gib,
            validation=figures,
            is_best=is_best,
            seconds_left=left,
            projected_hours=hours,
            projected_cost=cost,
        )
        self.trainer.begin_epoch()
        self.emit(row)
        if figures is not None and figures.headline is not None:
            self._judge(figures.headline)
        self.saver.save_epoch(is_best, last)
        if figures is not None and self.last_scores is not None and self.pictures is not None:
            with self.stop.at_rest(self.saver.save_beside):
                self.pictures.draw(epoch, self.last_scores, last, is_best)
        return True

    def _validate(self) -> ValidationFigures:
        self.session.enter(VALIDATION)
        try:
            scores = self.assembly.validator.run(
                self.stop,
                self._validating,
                lambda done, total, within: self.emit(Progress("validating", done, total, within)),
            )
        except Stopped:
            self.session.stop_with_others()
            raise
        self.last_scores, self._validation_seconds = scores, scores.seconds
        self.progress.validation_seconds += scores.seconds
        self.time_left.add_validation(self.trainer.scheduled_step, scores.seconds)
        return scores.figures()

    def _validating(self, done: int, total: int) -> None:
        self.saver.poll()
        self.emit(Progress("validating", done, total))

    def _judge(self, headline: float) -> None:
        """What a score that gets no better leads to; counted in the progress, so before the checkpoints."""
        score = self.recipe.task_facts.rising(headline)
        schedule, stopping = self.recipe.schedule, self.recipe.training.early_stopping
        if isinstance(schedule, PlateauSchedule) and lower_rate(schedule, self.progress, score):
            share = self.progress.rate_factor
            self.emit(
                Message(
                    f"no better for {counted(schedule.patience, 'validation')}: the learning rate is now {share:.3g} of its own"
                )
            )
        if stopping is not None and out_of_patience(stopping, self.progress, score):
            self.stop.ask(_out_of_patience_text(stopping), EXIT_DONE)
        self._stop_where_reached(headline)

    def _stop_where_reached(self, headline: float | None) -> None:
        reason = self.session.limits.reached_by(headline, self.recipe.task_facts)
        if reason is not None:
            self.stop.ask(reason, EXIT_DONE)

    def _is_best(self, figures: ValidationFigures | None) -> bool:
        value = None if figures is None else figures.headline
        if value is None or not math.isfinite(value):
            return False
        return self.recipe.task_facts.better(value, self.progress.best_value)


def _out_of_patience_text(stopping: EarlyStoppingSpec) -> str:
    return f"early stopping, no better for {counted(stopping.patience, 'validation')}"


class _Window:
    """Sums over the steps since the last log."""

    def __init__(self) -> None:
        self.steps = 0
        self.patches = 0
        self.wait_seconds = 0.0
        self._began = time.perf_counter()

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.patches += report.patches
        self.wait_seconds += report.wait_seconds
        if self.steps == 1:
            # The clock of the first step began before this window was made
            self._began = min(self._began, time.perf_counter() - report.step_seconds)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def patches_per_second(self) -> float:
        return self.patches / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        return min(self.wait_seconds / self.seconds, 1.0) if self.seconds else 0.0
