"""Owns what a run makes of memory that ran out: early, one try with a smaller batch; later, a checkpoint of where it was."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from fasttrain.engine.fit import Fit
from fasttrain.engine.phases import FIRST_STEP, TRAINING
from fasttrain.engine.session import Session
from fasttrain.errors import OutOfMemoryError
from fasttrain.recipe.training_spec import TrainingSpec
from fasttrain.telemetry.events import Message

FIRST_STEPS = 20
"""Of a session, within which a step may run out of memory since it was never tried, not since something has grown."""


def ran_out_early(session: Session, fit: Fit | None, begun: Mapping[str, Any]) -> bool:
    """Whether the run is in one of its first steps, in the epoch in which it began; `begun` is its progress then."""
    if session.phases.now not in (FIRST_STEP, TRAINING) or fit is None or fit.progress.epoch != begun["epoch"]:
        return False
    return fit.progress.step - int(begun["step"]) < FIRST_STEPS


def free_memory(error: BaseException | None = None) -> None:
    """Gives back what is no longer referred to, and what the frames of an error hold on to, activations among it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # After some failures a GPU answers no more
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def save_where_it_was(error: BaseException, fit: Fit | None, session: Session) -> None:
    """Writes the last checkpoint once memory ran out in a run that has trained: its last whole step stands.

    What goes wrong here is told, and takes the place of no error.
    """
    if fit is None or fit.progress.step == 0:
        return
    free_memory(error)
    try:
        fit.trainer.settle()
        fit.saver.save_beside()
    except Exception as second:
        session.emit(Message(f"no checkpoint could be written after that: {second}", "warning"))


def told_of_second_try(before: TrainingSpec, after: TrainingSpec, error: OutOfMemoryError) -> Message:
    """The one line about it."""
    return Message(
        f"out of memory in the first steps, so the batch is stepped down once: training.batch_size {before.batch_size} → "
        f"{after.batch_size}, training.accumulate {before.accumulate} → {after.accumulate}; the effective batch of "
        f"{after.batch_size * after.accumulate} and the learning rate stay ({error.faults[0]})",
        "warning",
    )


def as_former(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of the first try, as that of the run that goes on: a step of fewer patches holds less than was measured."""
    return {**plan, "step_bytes": 0}
