"""Owns the loop over steps: it draws batches, takes steps, and reports without making the device wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fasttrain.engine.optimisation.optim import LearningRate
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Step
from fasttrain.errors import DivergedError
from fasttrain.samples import Batch, BatchSource

MOST_BAD_STEPS_IN_A_ROW = 20
_STEPS_REMEMBERED = 1000
_CASES_NAMED = 8


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
        self._names: deque[list[str]] = deque(maxlen=_STEPS_REMEMBERED)
        """The cases of the last steps' batches."""

    @property
    def step(self) -> Step:
        """The unit that accelerations wrap."""
        return self.state.step

    @property
    def steps_in_epoch(self) -> int:
        """Of the open epoch, which may have begun with another batch."""
        return self.state.progress.epoch_steps or self.steps_per_epoch

    @property
    def scheduled_step(self) -> int:
        """Where the next step stands among the plan's steps, by which the schedule goes."""
        return self.state.progress.step + self.state.progress.schedule_shift

    def steps(self) -> Iterator[StepReport]:
        """The rest of the open epoch, a report a step. The progress is right between any two reports."""
        progress = self.state.progress
        self.step.network.train()
        self._take_up_sums()
        while progress.step_in_epoch < self.steps_in_epoch:
            began = time.perf_counter()
            rate = self.rate(self.scheduled_step) * progress.rate_factor
            loss, batches, patches = self._take(rate)
            self._names.append(batches.names)
            finite = torch.isfinite(loss)
            self._loss_sum += torch.where(finite, loss, 0.0)
            self._loss_count += finite
            progress.step += 1
            progress.step_in_epoch += 1
            progress.position += patches
            progress.learning_rate = rate
            seconds = time.perf_counter() - began
            progress.epoch_seconds += seconds
            progress.epoch_wait_seconds += batches.wait_seconds
            progress.training_seconds += seconds
            yield StepReport(
                epoch=progress.epoch + 1,
                step=progress.step,
                step_in_epoch=progress.step_in_epoch,
                loss=loss,
                learning_rate=rate,
                patches=patches,
                step_seconds=seconds,
                wait_seconds=batches.wait_seconds,
            )

    def _take(self, rate: float) -> tuple[torch.Tensor, _Timed, int]:
        """The next step's loss, the stream that its batches came from, and how many patches all ranks took."""
        progress = self.state.progress
        ranks = self.step.together.ranks
        if self._batches is None:
            self._batches = _Timed(self.source, progress.position, alike=progress.short_samples > 0)
        batches = self._batches
        batches.wait_seconds, batches.patches, batches.names = 0.0, 0, []
        if not progress.short_samples:
            loss = self.step(batches, rate, progress.step)
            return loss, batches, batches.patches * ranks
        # What is left of an epoch that was begun with another batch; whole batches go on behind it. Every rank takes all of it:
        # the mean of their gradients is the gradient
        loss = self.step.short(batches.first(progress.short_samples), rate, progress.step)
        progress.short_samples = 0
        self._batches = None
        return loss, batches, batches.patches

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
                f"training diverged: {streak} losses in a row were not finite by step {progress.step}; "
                f"{self._bad_batches(int(self.step.bad_streak) or streak)}; {cures(self.step)}"
            )
        return progress.loss_sum / progress.loss_count if progress.loss_count else float("nan")

    def check_last_epoch(self) -> None:
        """Raises DivergedError where the run ends in a streak of bad steps as long as half an epoch: a run too short for the
        streak that ends one must not pass for a trained one.
        """
        streak = int(self.step.bad_streak)
        if streak > 1 and 2 * streak >= self.steps_per_epoch:
            raise DivergedError(
                f"training diverged: the last {streak} of {self.state.progress.step} steps were not finite; "
                f"{self._bad_batches(streak)}; {cures(self.step)}"
            )

    def _bad_batches(self, streak: int) -> str:
        """The cases of the last so many steps, those first that came most often, and the loss scale."""
        counts = Counter(name for names in list(self._names)[-streak:] for name in names)
        named = ", ".join(
            name if count == 1 else f"{name} {count}×" for name, count in counts.most_common(_CASES_NAMED)
        )
        more = f" and {len(counts) - _CASES_NAMED} more" if len(counts) > _CASES_NAMED else ""
        scaler = self.step.scaler
        scale = f"the loss scale is {scaler.get_scale():.3g}" if scaler.is_enabled() else "losses are not scaled"
        return f"their batches held {named}{more}; {scale}"

    def begin_epoch(self) -> None:
        """Closes the open epoch: its sums are empty again and the next steps belong to the next one."""
        progress = self.state.progress
        progress.epoch += 1
        progress.step_in_epoch = 0
        progress.epoch_first, progress.epoch_steps = progress.position, self.steps_per_epoch
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


def cures(step: Step) -> str:
    """What helps against losses that are not finite, of what a run does not do already."""
    dtype, device = step.precision.dtype, step.last_loss.device
    if dtype is None:
        return "lower optimizer.learning_rate or lengthen schedule.warmup"
    # A card of this kind has bf16, which has the range of float32
    wider = dtype is torch.float16 and torch.cuda.get_device_capability(device) >= (8, 0)
    other = "bf16" if wider else "off"
    return f"lower optimizer.learning_rate, lengthen schedule.warmup, or set acceleration.amp: {other}"


class _Timed(Iterator[Batch]):
    """A stream of batches that measures how long the trainer waited for it, if it is one that is waited for."""

    def __init__(self, source: BatchSource, first_position: int, alike: bool = False) -> None:
        self._source = source
        self._batches = source.batches(first_position, alike) if alike else source.batches(first_position)
        self.wait_seconds = 0.0
        self.patches = 0
        self.names: list[str] = []

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch = next(self._batches)
        if self._source.waited_for:
            self.wait_seconds += time.perf_counter() - began
        self.patches += batch.image.shape[0]
        self.names += batch.names
        return batch

    def first(self, samples: int) -> list[Batch]:
        """Batches of so many samples together, the last one cut; what was cut off is for the stream that follows this one."""
        found: list[Batch] = []
        while samples > 0:
            batch = next(self)
            surplus = max(batch.image.shape[0] - samples, 0)
            if surplus:
                batch = _cut(batch, samples)
                self.patches -= surplus
            samples -= batch.image.shape[0]
            found.append(batch)
        return found


def _cut(batch: Batch, samples: int) -> Batch:
    return Batch(batch.image[:samples], batch.label[:samples], batch.positions[:samples], batch.names[:samples])
