"""Owns the estimate of how long a run still takes, validation counted in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low


def estimate_seconds_left(
    steps_left: int,
    validations_left: int,
    seconds_per_step: Sequence[float],
    seconds_per_validation: Sequence[float],
    steps_per_validation: float = 0.0,
) -> float | None:
    """Seconds for the steps and validations that are left, at the median pace of those measured.

    The lower median, so that of two measurements the one with compilation and cold caches in it does not count. None
    before a step was measured. Until a validation was measured it counts as long as `steps_per_validation` steps.
    """
    if steps_left > 0 and not seconds_per_step:
        return None
    training = max(steps_left, 0) * median_low(seconds_per_step) if seconds_per_step else 0.0
    if seconds_per_validation:
        one = median_low(seconds_per_validation)
    else:
        one = steps_per_validation * median_low(seconds_per_step) if seconds_per_step else 0.0
    return training + max(validations_left, 0) * one


class TimeLeft:
    """Collects measured paces of a run and says how many seconds it still takes.

    Steps count from 1 through the whole run, epochs likewise; a validation follows every `validate_every` epochs, and
    the last one.
    """

    def __init__(self, epochs: int, steps_per_epoch: int, validate_every: int, recent: int = 9) -> None:
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._validate_every = validate_every
        self._seconds_per_step: deque[float] = deque(maxlen=recent)
        self._seconds_per_validation: deque[float] = deque(maxlen=recent)
        self._validated_step = 0
        self._steps_per_validation = 0.0

    def expect_validation(self, steps: float) -> None:
        """How many training steps a validation takes as long as, by what is to be computed: until one was measured."""
        self._steps_per_validation = steps

    def add_steps(self, steps: int, seconds: float) -> None:
        """Takes the time of some training steps, without validation and checkpoints."""
        if steps > 0:
            self._seconds_per_step.append(seconds / steps)

    def add_validation(self, step: int, seconds: float) -> None:
        """Takes the time of one validation, made after `step` steps."""
        self._seconds_per_validation.append(seconds)
        self._validated_step = step

    def seconds_left(self, step: int) -> float | None:
        """Seconds until the end after `step` steps; None before the first step was measured."""
        steps_left = self._epochs * self._steps_per_epoch - step
        return estimate_seconds_left(
            steps_left,
            self.validations_left(step),
            list(self._seconds_per_step),
            list(self._seconds_per_validation),
            self._steps_per_validation,
        )

    def validations_left(self, step: int) -> int:
        """Validations still to come after `step` steps, with the one due at this very step if not yet made."""
        made = step // self._steps_per_epoch
        due_now = (
            step % self._steps_per_epoch == 0 and made > 0 and self._validated_step != step and self._validates(made)
        )
        last_is_extra = self._epochs % self._validate_every != 0 and made < self._epochs
        to_come = self._epochs // self._validate_every - made // self._validate_every
        return max(to_come, 0) + int(last_is_extra) + int(due_now)

    def _validates(self, epoch: int) -> bool:
        return epoch == self._epochs or epoch % self._validate_every == 0
