"""Owns when a checkpoint is due, which ones are kept, and the writing of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from fasttrain.checkpoints import write_checkpoint
from fasttrain.engine.state import TrainState
from fasttrain.recipe.run_spec import OutputSpec, parse_interval
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import CheckpointSaved, Event, Message


class Saver:
    """Writes `last`, `best` and the periodic checkpoints of a run."""

    def __init__(
        self,
        folder: RunFolder,
        spec: OutputSpec,
        state: TrainState,
        emit: Callable[[Event], None],
        total_seconds: Callable[[], float],
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.state = state
        self.emit = emit
        self.total_seconds = total_seconds
        self.interval = parse_interval(spec.checkpoint_every)
        self._saved_at = time.monotonic()

    def due_within_epoch(self) -> bool:
        """After a step: true where the interval is one of steps or of time and has passed."""
        if self.interval.unit == "steps":
            return self.state.progress.step % int(self.interval.amount) == 0
        return self.interval.unit == "seconds" and time.monotonic() - self._saved_at >= self.interval.amount

    def due_after_epoch(self) -> bool:
        """After an epoch was closed: true where its end is a multiple of the interval."""
        if self.interval.unit == "epochs":
            return self.state.progress.epoch % int(self.interval.amount) == 0
        return self.due_within_epoch()

    def save_last(self) -> None:
        """Renews `last.pt`."""
        self._save(self.folder.last)
        self._saved_at = time.monotonic()

    def save_best(self) -> None:
        """Renews `best.pt`."""
        self._save(self.folder.best)

    def keep_epoch(self) -> None:
        """Writes the periodic checkpoint where this epoch has one, and removes those beyond `output.keep`."""
        epoch = self.state.progress.epoch
        if not self.spec.keep_every or epoch % self.spec.keep_every:
            return
        self._save(self.folder.epoch_file(epoch))
        for path in self.folder.epoch_files()[: -self.spec.keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _save(self, path: Path) -> None:
        if not self.state.finite():
            self.emit(Message(f"{path.name} is not renewed: a weight is not finite; the former one stands", "warning"))
            return
        began = time.perf_counter()
        self.state.progress.total_seconds = self.total_seconds()
        size = write_checkpoint(path, self.state.capture())
        progress = self.state.progress
        seconds = time.perf_counter() - began
        self.emit(CheckpointSaved(str(path), progress.epoch, progress.step, seconds, size / (1 << 20)))
