"""Owns the loop over steps: it draws batches, takes steps, and reports without making the device wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fasttrain.engine.optimisation.optim import LearningRate
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Step
from fasttrain.errors import DivergedError
from fasttrain.samples import Batch, BatchSource

MOST_BAD_STEPS_IN_A_ROW = 20
_CURES = "lower optimizer.learning_rate, lengthen schedule.warmup, or set acceleration.amp: bf16"


@dataclass(frozen=True)
class StepReport:
    """What is known after a step without asking the device. `loss` is a device tensor that the next step overwrites."""

    epoch: int
    step: int
    step_in_epoch: int
    loss: torch.Tensor
    learning_rate: float
    patches: int
    step_seconds: float
    wait_seconds: float


class Trainer:
    """Steps from the state's progress on. A sweep, a profile or a test is the same generator cut short."""

    def __init__(self, state: TrainState, source: BatchSource, rate: LearningRate, steps_per_epoch: int) -> None:
        self.state = state
        self.source = source
        self.rate = rate
        self.steps_per_epoch = steps_per_epoch
        device = state.step.last_loss.device
        # Sums of the open epoch, float64 so that their order of magnitude never matters
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_count = torch.zeros((), dtype=torch.int64, device=device)
        self._counting = False
        """Whether the sums on the device are the progress's: between epochs, and after a restore, the progress knows better."""
        self._batches: _Timed | None = None

    @property
    def step(self) -> Step:
        """The unit that accelerations wrap."""
        return self.state.step

    def steps(self) -> Iterator[StepReport]:
        """The rest of the open epoch, a report a step. The progress is right between any two reports."""
        progress = self.state.progress
        self.step.network.train()
        self._take_up_sums()
        if self._batches is None:
            self._batches = _Timed(self.source, progress.position)
        while progress.step_in_epoch < self.steps_per_epoch:
            began = time.perf_counter()
            self._batches.wait_seconds = 0.0
            self._batches.patches = 0
            rate = self.rate(progress.step) * progress.rate_factor
            loss = self.step(self._batches, rate, progress.step)
            finite = torch.isfinite(loss)
            self._loss_sum += torch.where(finite, loss, 0.0)
            self._loss_count += finite
            progress.step += 1
            progress.step_in_epoch += 1
            progress.position += self._batches.patches
            seconds = time.perf_counter() - began
            progress.epoch_seconds += seconds
            progress.epoch_wait_seconds += self._batches.wait_seconds
            progress.training_seconds += seconds
            yield StepReport(
                epoch=progress.epoch + 1,
                step=progress.step,
                step_in_epoch=progress.step_in_epoch,
                loss=loss,
                learning_rate=rate,
                patches=self._batches.patches,
                step_seconds=seconds,
                wait_seconds=self._batches.wait_seconds,
            )

    def settle(self) -> float:
        """Reads the device: brings the loss sums into the progress and returns the mean loss of the open epoch so far.

        Raises DivergedError after too many steps in a row whose loss was not finite.
        """
        progress = self.state.progress
        began = time.perf_counter()
        if self._counting:
            progress.loss_sum = float(self._loss_sum)
            progress.loss_count = int(self._loss_count)
        streak = int(self.step.worst_streak)
        # The device may be many steps behind the host: what it still had to do are seconds of training
        waited = time.perf_counter() - began
        progress.epoch_seconds += waited
        progress.training_seconds += waited
        if streak >= MOST_BAD_STEPS_IN_A_ROW:
            raise DivergedError(
                f"training diverged: {streak} losses in a row were not finite by step {progress.step}; {_CURES}"
            )
        return progress.loss_sum / progress.loss_count if progress.loss_count else float("nan")

    def check_last_epoch(self) -> None:
        """Raises DivergedError where the run ends in a streak of bad steps as long as half an epoch: a run too short for the
        streak that ends one must not pass for a trained one.
        """
        streak = int(self.step.bad_streak)
        if streak > 1 and 2 * streak >= self.steps_per_epoch:
            raise DivergedError(
                f"training diverged: the last {streak} of {self.state.progress.step} steps were not finite; {_CURES}"
            )

    def begin_epoch(self) -> None:
        """Closes the open epoch: its sums are empty again and the next steps belong to the next one."""
        progress = self.state.progress
        progress.epoch += 1
        progress.step_in_epoch = 0
        progress.loss_sum, progress.loss_count = 0.0, 0
        self._counting = False
        progress.epoch_seconds, progress.epoch_wait_seconds = 0.0, 0.0

    def _take_up_sums(self) -> None:
        self._loss_sum.fill_(self.state.progress.loss_sum)
        self._loss_count.fill_(self.state.progress.loss_count)
        self._counting = True

    def close(self) -> None:
        """Ends the source and its workers."""
        self._batches = None
        self.source.close()


class _Timed(Iterator[Batch]):
    """A stream of batches that measures how long the trainer waited for it, if it is one that is waited for."""

    def __init__(self, source: BatchSource, first_position: int) -> None:
        self._source = source
        self._batches = source.batches(first_position)
        self.wait_seconds = 0.0
        self.patches = 0

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch = next(self._batches)
        if self._source.waited_for:
            self.wait_seconds += time.perf_counter() - began
        self.patches += batch.image.shape[0]
        return batch
