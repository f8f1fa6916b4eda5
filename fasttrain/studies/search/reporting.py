"""Owns what a trial's run tells the search while it goes on, and how it waits for its turn on the device: an observer of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_TERMINATED
from fasttrain.studies.search.lines import Lines
from fasttrain.studies.search.told import PRUNED
from fasttrain.telemetry.events import EpochEnded, Event, FirstStep, Message, Progress, RunEnded, RunStarted, StepLogged

TRAINING, VALIDATION = "training", "validation"
_GIB = float(1 << 30)
_ANSWER_SECONDS = 0.3
"""For which a run waits to hear whether it is pruned; the answer of a slow storage comes while it trains on."""


class Reporter:
    """Sends a line an event, and hears `go`, `prune`, `on`, `threads` and `stop` by `hear`, from another thread."""

    def __init__(self, lines: Lines, stop: StopRequest) -> None:
        self._lines = lines
        self._stop = stop
        self._go = threading.Event()
        self._answered = threading.Event()
        self._threads: int | None = None
        self._epochs = 0
        self._since: float | None = None
        """When what the device is at began; None where it is at nothing."""
        self._validating: float | None = None
        """When a validation first told of itself, which is after a case of it."""
        self._released = False
        self.spans: dict[str, list[tuple[float, float]]] = {TRAINING: [], VALIDATION: []}
        self.device = ""
        self.lowered: str | None = None

    def hear(self, word: dict[str, Any]) -> None:
        """A line from the search."""
        if "go" in word:
            self._go.set()
        elif "threads" in word:
            self._threads = int(word["threads"])
        elif "stop" in word:
            self._stop.ask(word["stop"], int(word["code"]))
            self._go.set()
            self._answered.set()
        elif "prune" in word:
            if word["prune"]:
                # It counts as stopped, so that a person may resume it
                self._stop.ask(PRUNED, EXIT_TERMINATED)
            self._answered.set()

    def on_event(self, event: Event) -> None:
        """See `Observer`."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        if isinstance(event, RunStarted):
            self._epochs, self.device = event.epochs, event.device
        elif isinstance(event, FirstStep):
            self._lines.send({"ready": event.seconds})
            while not self._go.wait(0.1) and not self._stop.asked:
                pass
            self._since = time.time()
        elif isinstance(event, Progress) and event.what.startswith("validating"):
            self._validating = self._validating or time.time()
        elif isinstance(event, StepLogged):
            self._lines.send({"rate": event.patches_per_second})
        elif isinstance(event, EpochEnded):
            self._epoch_ended(event)
        elif isinstance(event, RunEnded):
            self._leave()
        elif isinstance(event, Message) and event.text.startswith("out of memory in the first steps"):
            self.lowered = event.text
            self._lines.send({"message": event.text})

    def close(self) -> None:
        """See `Observer`."""
        self._leave()

    def _epoch_ended(self, event: EpochEnded) -> None:
        last = event.epoch >= self._epochs
        self._validating = None if event.validation is None else time.time() - event.validation.seconds
        self._count()
        if last:
            self._release()
        score = None if event.validation is None else event.validation.headline
        self._answered.clear()
        self._lines.send({"epoch": event.epoch, "epochs": self._epochs, "score": score, "gib": peak_gib()})
        if score is not None and not last:
            self._answered.wait(_ANSWER_SECONDS)
            if self._stop.reason == PRUNED:
                self._leave()
                return
        self._since = None if last else time.time()

    def _count(self) -> None:
        """What the device was at until now: training, up to where a validation began."""
        now, began = time.time(), self._since
        if began is not None:
            turned = now if self._validating is None else min(max(self._validating, began), now)
            for phase, begin, end in ((TRAINING, began, turned), (VALIDATION, turned, now)):
                if end > begin:
                    self.spans[phase].append((round(begin, 3), round(end, 3)))
        self._since = self._validating = None

    def _leave(self) -> None:
        self._count()
        self._release()

    def _release(self) -> None:
        """What follows (plots, the last checkpoint) needs no turn."""
        if not self._released:
            self._released = True
            self._lines.send({"released": True})


def peak_gib() -> float | None:
    """Of the device's memory, that this process held at most since `forget_peak`; on a CPU of the machine's."""
    if torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_reserved() / _GIB)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
