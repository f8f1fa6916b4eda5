"""Owns what a run prints where stderr is no terminal: plain lines, one an epoch, and a sign of life in between."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from fasttrain.cli.figures import (
    device_text,
    duration_text,
    end_line,
    first_step_line,
    hours_text,
    loss_text,
    one_line,
    rate_text,
    scientific_text,
    scores_text,
    share_text,
    start_lines,
)
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.telemetry.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    FirstStep,
    Message,
    Progress,
    RunEnded,
    RunStarted,
    StepLogged,
)


class PlainView:
    """Observer that prints plain flushed lines: no colour, no carriage return, no escape code.

    After `heartbeat_seconds` without a line it prints what is under way, from a daemon thread too, since a long silent
    phase sends no events. A stream that has gone away (a closed pipe, a lost terminal) silences the view and never the run.
    """

    def __init__(self, stream: TextIO | None = None, heartbeat_seconds: float = 30.0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._heartbeat_seconds = heartbeat_seconds
        self._lock = threading.RLock()
        self._epochs = 0
        self._under_way = "starting"
        now = time.monotonic()
        self._began = self._printed = self._heard = now
        self._over = threading.Event()
        self._beat = threading.Thread(target=self._beat_until_over, name="plain-view-heartbeat", daemon=True)
        self._beat.start()

    def on_event(self, event: Event) -> None:
        """Prints the event's line, if it has one, else a heartbeat where one is due."""
        with self._lock:
            if isinstance(event, RunEnded):
                self._over.set()
            for line in self._lines(event):
                self._print(line)
            self._heard = time.monotonic()
            self._beat_if_due()

    def close(self) -> None:
        """Stops the heartbeat; may be called twice."""
        self._over.set()
        if self._beat is not threading.current_thread():
            self._beat.join(timeout=2.0)

    def _lines(self, event: Event) -> list[str]:
        if isinstance(event, RunStarted):
            self._epochs = event.epochs
            self._under_way = "preparing"
            return start_lines(event)
        if isinstance(event, EpochEnded):
            self._under_way = f"after epoch {self._of_all(event.epoch)}"
            return [self._epoch_line(event)]
        if isinstance(event, Message):
            return [one_line(f"warning: {event.text}" if event.level == "warning" else event.text)]
        if isinstance(event, RunEnded):
            return [end_line(event, ON_FINISH.option)]
        if isinstance(event, FirstStep):
            self._under_way = "first step taken"
            return [first_step_line(event)]
        if isinstance(event, Progress):
            within = f", now {event.within}" if event.within else ""
            self._under_way = one_line(f"{event.what}: {event.done} of {event.total}{within}")
        elif isinstance(event, StepLogged):
            self._under_way = self._step_text(event)
        elif isinstance(event, CheckpointSaved):
            self._under_way = f"checkpoint of step {event.step} saved"
        return []

    def _epoch_line(self, event: EpochEnded) -> str:
        parts = [f"epoch {self._of_all(event.epoch)}", f"step {event.step}", f"loss {loss_text(event.train_loss)}"]
        scores = event.validation
        if scores is not None:
            parts.append(scores_text(scores))
            if scores.hd95 is not None:
                parts.append(f"hd95 {scores.hd95:.1f} mm")
        parts += [f"lr {scientific_text(event.learning_rate)}", *_pace(event)]
        return "  ".join([*parts, "best so far"] if event.is_best else parts)

    def _step_text(self, event: StepLogged) -> str:
        parts = [f"epoch {self._of_all(event.epoch)}", f"step {event.step}", f"loss {loss_text(event.loss)}"]
        return "  ".join([*parts, *_pace(event)])

    def _of_all(self, epoch: int) -> str:
        return f"{epoch}/{self._epochs}" if self._epochs else str(epoch)

    def _beat_until_over(self) -> None:
        while not self._over.wait(max(self._printed + self._heartbeat_seconds - time.monotonic(), 0.01)):
            with self._lock:
                self._beat_if_due()

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if self._over.is_set() or now - self._printed < self._heartbeat_seconds:
            return
        silence = now - self._heard
        news = f"  (nothing new for {duration_text(silence)})" if silence >= self._heartbeat_seconds else ""
        self._print(f"still running after {duration_text(now - self._began)}: {self._under_way}{news}")

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        try:
            try:
                self._stream.write(line + "\n")
            except UnicodeEncodeError:
                self._stream.write(line.encode("ascii", "replace").decode("ascii") + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._over.set()


def _pace(event: EpochEnded | StepLogged) -> list[str]:
    device = device_text(event)
    parts = [rate_text(event.patches_per_second), f"waiting {share_text(event.wait_share)}"]
    if device is not None:
        parts.append(device)
    if event.seconds_left is not None:
        parts.append(f"left {duration_text(event.seconds_left)}")
    whole = hours_text(event.projected_hours, event.projected_cost)
    if whole is not None:
        parts.append(whole)
    return parts
