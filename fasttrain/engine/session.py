"""Owns what the parts of one run share: whom to tell, when it began, whether to stop."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.engine.stop import StopRequest
from fasttrain.telemetry.events import Event, Observer


@dataclass
class Session:
    """One stretch of a run, from a process's start to its end. `began` is in Unix seconds."""

    observers: list[Observer]
    stop: StopRequest
    began: float

    def emit(self, event: Event) -> None:
        """Tells every observer."""
        for observer in self.observers:
            observer.on_event(event)

    def close(self) -> None:
        """Ends every observer."""
        for observer in self.observers:
            observer.close()
