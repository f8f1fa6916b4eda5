"""Owns what the parts of one run share: whom to tell, when it began, whether to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fasttrain.data.made_ahead import MadeAhead
from fasttrain.engine.limits import Account, Limits, LimitTimer
from fasttrain.engine.phases import BUILDING, FILLING, FIRST_STEP, TRAINING, Phases
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_TERMINATED
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.telemetry.attempts import Attempt
from fasttrain.telemetry.events import Event, Observer
from fasttrain.telemetry.start_clock import StartClock

_SECONDS_FOR_A_REASON = 2.0
"""Until why another rank was told to stop is known here."""
_ENDED_BEFORE = {FILLING: "plan", BUILDING: "read", FIRST_STEP: "build", TRAINING: "first_step"}
"""The part of the start that is over when a phase begins."""


@dataclass
class Session:
    """One stretch of a run, from a process's start to its end. `began` is in Unix seconds; earlier: the attempts before it;
    ahead: volumes that were begun before they are asked for; paid_since: when the process began, where it did other work before;
    ranks: the processes that train together.
    """

    observers: list[Observer]
    stop: StopRequest
    began: float
    limits: Limits = field(default_factory=Limits)
    earlier: tuple[Attempt, ...] = ()
    phases: Phases = field(default_factory=Phases)
    ahead: MadeAhead | None = None
    paid_since: float | None = None
    ranks: Ranks = ONLY_ONE
    start: StartClock = field(init=False)
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.start = StartClock(self.began)
        self._timer: LimitTimer | None = None
        self._asking: Callable[[], bool] | None = None
        self.account = Account(self.paid_since or self.began, self.limits.price_per_hour, self.earlier)

    def heed_limits(self) -> None:
        """From now on the hours and the money that the user set end the run, whatever it is at."""
        self._timer = LimitTimer(self.limits, self.account, self.stop)

    def ends_here(self, at_once: bool = False) -> bool:
        """Whether a stop was asked for, the same answer on every rank; all ask at the same places.

        Of several ranks the answer is to the question before, so that none waits for another, unless it is to be known `at_once`.
        """
        if self.ranks.place.alone:
            return self.stop.asked
        former, self._asking = self._asking, self.ranks.begin_any(self.stop.asked)
        found = former() if former is not None else False
        if at_once:
            found = self._asking() or found
            self._asking = None
        if found:
            self.stop_with_others()
        return found

    def stop_with_others(self) -> None:
        """Another rank may have been asked to stop, and not this one."""
        until = time.monotonic() + _SECONDS_FOR_A_REASON
        while not self.stop.asked and time.monotonic() < until:
            time.sleep(0.05)
        self.stop.ask("a stop of another rank", EXIT_TERMINATED)

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
        """Ends every observer and what was begun ahead; limits bind no more."""
        if self.ahead is not None:
            self.ahead.close()
        if self._timer is not None:
            self._timer.close()
        for observer in self.observers:
            observer.close()
