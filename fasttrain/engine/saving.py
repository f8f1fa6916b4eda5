"""Owns when a checkpoint is due, which ones are kept, and the writing of them beside the training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fasttrain.background import Background
from fasttrain.checkpoints import Snapshot, Snapshots, write_checkpoint
from fasttrain.engine.saving_job import Job, Written, told_once
from fasttrain.engine.state import TrainState
from fasttrain.errors import StorageError, ran_out_of_memory
from fasttrain.recipe.run_spec import OutputSpec, parse_intervals
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import CheckpointSaved, Event, Message

RETRY_SECONDS = 30.0
"""Until a checkpoint that could not be written is tried again."""


class Saver:
    """Writes `last`, `best` and the periodic checkpoints of a run, one state at a time, in a thread of its own: the training
    waits for a copy of the state alone. A file that cannot be written leaves the former one; it is told, tried again, and is an
    error only where the run ends without it.
    """

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
        self.intervals = parse_intervals(spec.checkpoint_every)
        self._saved_at = time.monotonic()
        self._snapshots = Snapshots()
        self._background: Background[list[Written] | None] = Background("checkpoint-writer")
        self._job: Job | None = None
        self._lock = threading.RLock()
        self._deferred = False
        self._owed: dict[Path, Job] = {}
        """Files that could not be written, with the state that they should hold."""
        self._retry_at = 0.0
        self._last: tuple[int, int] | None = None
        """Epoch and step that `last.pt` holds, where this session wrote it."""
        self.figures: dict[str, Any] = {}
        """Of the newest `last.pt` that this session wrote: its step, size and seconds."""

    def due_within_epoch(self) -> bool:
        """After a step: true where an interval of steps or time has passed, or a write is to be tried again."""
        return self._due("steps", self.state.progress.step) or self._overdue()

    def due_after_epoch(self) -> bool:
        """After an epoch was closed: true where its end is a multiple of the interval too."""
        return self._due("epochs", self.state.progress.epoch) or self.due_within_epoch()

    def due_before_validation(self, seconds: float) -> bool:
        """Before a validation of about so many seconds: true where an interval of time ends in it."""
        return self._overdue(seconds)

    def renew_last(self) -> None:
        """Renews `last.pt` where it is due: at once, or after one of the next steps if a state is still being written.

        Where steps are counted, the training waits for that one: whoever asks for every step gets every step.
        """
        self.poll()
        if self._background.given and not self._due("steps", self.state.progress.step):
            self._deferred = True
        else:
            self.save_last()

    def save_last(self) -> None:
        """Begins to renew `last.pt` with the state as it is, once what is being written is."""
        self._begin([self.folder.last])

    def save_epoch(self, is_best: bool, is_last: bool) -> None:
        """At the end of an epoch: `best.pt`, the periodic file and `last.pt`, those that are due, from one copy of the state."""
        epoch, paths = self.state.progress.epoch, []
        if is_best:
            paths.append(self.folder.best)
        if self.spec.keep_every and epoch % self.spec.keep_every == 0:
            paths.append(self.folder.epoch_file(epoch))
        due = is_last or self.due_after_epoch()
        if paths or is_last:
            self._begin([*paths, self.folder.last] if due else paths)
        elif due:
            self.renew_last()

    def poll(self) -> None:
        """Between two steps: tells what became of a state that was being written, and tries again what could not be."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._background.given and not self._background.busy:
                self._settle()
            if self._owed and not self._background.given and time.monotonic() >= self._retry_at:
                self._try_again()
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Waits until all is written; raises StorageError with what could not be, after a last try."""
        self._wait()
        for path, job in list(self._owed.items()):
            self._give(replace(job, paths=(path,), pause_seconds=0.0))
            self._wait()
        if self._owed:
            raise StorageError([job.fault for job in self._owed.values()])

    def close(self) -> None:
        """Waits for what is being written; what goes wrong is told, and takes the place of no error."""
        try:
            self._wait()
        except Exception as error:
            self.emit(Message(f"a checkpoint could not be written: {error}", "warning"))

    def lost_best(self) -> bool:
        """True, and told, where the network of the best score so far was written and is not there any more."""
        best, underway = self.folder.best, self._background.given or self.folder.best in self._owed
        lost = self.state.progress.best_epoch is not None and not underway and not best.exists()
        if lost:
            self.emit(Message(f"{best} is gone: the best of the epochs from here on is kept", "warning"))
        return lost

    def standing(self) -> str:
        """What there is to go on from, in words."""
        if self._last is not None:
            return f"{self.folder.last} of step {self._last[1]} stands, and its weights are finite"
        return f"{self.folder.last} stands" if self.folder.last.exists() else "no checkpoint was written yet"

    def save_beside(self) -> None:
        """From another thread, while the training changes no state and then never again: renews `last.pt`, or raises."""
        with self._lock:
            if self._background.given:
                self._background.fetch()
            if self._last != self._here():
                progress = self.state.progress
                progress.total_seconds = self.total_seconds()
                device = self.state.step.last_loss.device
                with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                    written = self._write(Job(self._copy(), (self.folder.last,), progress.epoch, progress.step, 0.0))
                for one in written or []:
                    if one.fault is not None:
                        raise one.fault

    def _due(self, unit: str, count: int) -> bool:
        return any(one.unit == unit and count % int(one.amount) == 0 for one in self.intervals)

    def _overdue(self, more_seconds: float = 0.0) -> bool:
        now = time.monotonic()
        if self.folder.last in self._owed or self._deferred:
            return now >= self._retry_at and not self._background.busy
        since = now - self._saved_at + more_seconds
        return any(one.unit == "seconds" and since >= one.amount for one in self.intervals)

    def _here(self) -> tuple[int, int]:
        return self.state.progress.epoch, self.state.progress.step

    def _begin(self, paths: Sequence[Path]) -> None:
        if list(paths) == [self.folder.last] and self._last == self._here() and not self._background.given:
            return
        with self._lock:
            began = time.perf_counter()
            self._wait()
            progress = self.state.progress
            progress.total_seconds = self.total_seconds()
            snapshot = self._copy()
            pause = time.perf_counter() - began
            job = Job(snapshot, tuple(paths), progress.epoch, progress.step, pause)
            if self.folder.last in paths:
                self._saved_at, self._deferred = time.monotonic(), False
            self._give(job)
            if not snapshot.is_copy:
                self._wait()
                job.pause_seconds = time.perf_counter() - began

    def _copy(self) -> Snapshot:
        """A copy, or where the host has no memory for one the state itself, which must then be written before it changes."""
        state: dict[str, Any] = {"finite": self.state.finite(), "state": self.state.capture()}
        try:
            return self._snapshots.take(state)
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            return Snapshot.of(state)

    def _give(self, job: Job) -> None:
        self._job = job
        self._background.give(lambda: self._write(job))

    def _write(self, job: Job) -> list[Written] | None:
        """In the writing thread; None where a weight is not finite."""
        taken = job.snapshot.state()
        if not bool(taken["finite"]):
            return None
        written = []
        for path in job.paths:
            began = time.perf_counter()
            # Somebody may have removed it; where the run's folder is gone as well, the write says so
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
            try:
                size = write_checkpoint(path, taken["state"])
            except StorageError as error:
                written.append(Written(path, fault=error))
            else:
                written.append(Written(path, size, time.perf_counter() - began))
                if path not in (self.folder.last, self.folder.best):
                    self._drop_older()
        return written

    def _drop_older(self) -> None:
        for path in self.folder.epoch_files()[: -self.spec.keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _wait(self) -> None:
        if self._background.given:
            self._settle()

    def _settle(self) -> None:
        """Fetches what became of a job, and tells it."""
        job, self._job = self._job, None
        assert job is not None
        written = self._background.fetch()
        if written is None:
            names = " and ".join(path.name for path in job.paths)
            self.emit(Message(f"{names}: not renewed, since a weight is not finite; the former one stands", "warning"))
        for one in written or []:
            self._tell(job, one)
        if job.snapshot.is_copy and all(one.snapshot is not job.snapshot for one in self._owed.values()):
            self._snapshots.give_back(job.snapshot)

    def _tell(self, job: Job, one: Written) -> None:
        if one.fault is not None:
            self._owe(job, one.path, one.fault)
            return
        if self._owed.pop(one.path, None) is not None:
            self.emit(Message(f"{one.path.name} could be written again: it holds step {job.step}"))
        pause = job.pause_seconds + job.snapshot.copy_seconds
        mib = one.size / (1 << 20)
        first = one.path == self.folder.last and not self.figures
        if one.path == self.folder.last:
            self._last = (job.epoch, job.step)
            self.figures = {"step": job.step, "mib": mib, "seconds": one.seconds, "pause_seconds": pause}
        self.emit(CheckpointSaved(str(one.path), job.epoch, job.step, one.seconds, mib, pause))
        if first:
            self.emit(told_once(mib, one.seconds, pause, self.spec.checkpoint_every))

    def _owe(self, job: Job, path: Path, fault: StorageError) -> None:
        if path != self.folder.last and path != self.folder.best:
            # Of the periodic ones the newest alone is kept in memory
            for other in [one for one in self._owed if one not in (self.folder.last, self.folder.best)]:
                del self._owed[other]
        self._owed[path] = replace(job, fault=fault.faults[0])
        self._retry_at = time.monotonic() + RETRY_SECONDS
        stands = f"the former {path.name} stands" if path.exists() else f"there is no {path.name} yet"
        self.emit(
            Message(
                f"{fault.faults[0]}; {stands}, training goes on, and it is tried again in {RETRY_SECONDS:g} s",
                "warning",
            )
        )

    def _try_again(self) -> None:
        """What `last.pt` should hold by now is what the state is by now; other files hold what they were to hold."""
        for path, job in self._owed.items():
            if path != self.folder.last:
                self._give(replace(job, paths=(path,), pause_seconds=0.0))
                return
