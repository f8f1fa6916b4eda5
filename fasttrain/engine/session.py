"""Owns what the parts of one run share: whom to tell, when it began, whether to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from fasttrain.engine.phases import BUILDING, FILLING, FIRST_STEP, TRAINING, Phases
from fasttrain.engine.stop import StopRequest
from fasttrain.telemetry.events import Event, Observer
from fasttrain.telemetry.start_clock import StartClock

_ENDED_BEFORE = {FILLING: "plan", BUILDING: "read", FIRST_STEP: "build", TRAINING: "first_step"}
"""The part of the start that is over when a phase begins."""


@dataclass
class Session:
    """One stretch of a run, from a process's start to its end. `began` is in Unix seconds."""

    observers: list[Observer]
    stop: StopRequest
    began: float
    phases: Phases = field(default_factory=Phases)
    start: StartClock = field(init=False)

    def __post_init__(self) -> None:
        self.start = StartClock(self.began)

    def emit(self, event: Event) -> None:
        """Tells every observer."""
        for observer in self.observers:
            observer.on_event(event)

    def enter(self, phase: str) -> None:
        """A phase of the run begins."""
        self.phases.enter(phase)
        if phase in _ENDED_BEFORE:
            self.start.ended(_ENDED_BEFORE[phase])

    def close(self) -> None:
        """Ends every observer."""
        for observer in self.observers:
            observer.close()
