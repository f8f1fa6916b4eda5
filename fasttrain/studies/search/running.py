"""Owns a search under way: trials asked for and told, carried out by workers, until there are as many as wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_BUG, EXIT_DONE, MachineError
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.one_trial import OneTrial
from fasttrain.studies.search.pool import Pool, Worker
from fasttrain.studies.search.processes import Presence, reclaim
from fasttrain.studies.search.storage import HEARTBEAT_SECONDS, JOURNAL, patiently
from fasttrain.studies.search.study import SURPLUS, Study, counted_trials
from fasttrain.studies.search.taking import taking
from fasttrain.studies.search.told import Told
from fasttrain.studies.search.turns import Turns, fits_beside

_LOOK_SECONDS = 0.2
_IDLE_SECONDS = 0.5
_RECLAIM_SECONDS = 30.0
_SILENT_SECONDS = 30.0
"""After which the search says where its trials are."""
_FAILURES_IN_A_ROW = 5
"""Of trials, after which something else is wrong than their values."""


@dataclass(frozen=True)
class Wanted:
    """What a search is asked for.

    trials: of the whole study. parallel: so many train at once, None: one or two, as measured. device_gib: the card's memory;
    None on a CPU. shares: the folder of volumes that all trials use. warm: a worker that has looked at the data already.
    """

    base: ResolvedRecipe
    data: Path | None
    device: str
    trials: int
    parallel: int | None
    on_gpu: bool
    device_gib: float | None
    cpus: int
    shares: Path | None
    hours: float | None = None
    warm: Worker | None = None


class Search:
    """Carries out trials in slots, a thread each. On a GPU there are two at least: while a trial trains, the next one gets ready,
    where both have room on the card.
    """

    def __init__(
        self,
        study: Study,
        wanted: Wanted,
        pool: Pool,
        stop: StopRequest,
        tell: Callable[[Told], None],
        began: float,
        presence: Presence | None = None,
    ) -> None:
        self.study = study
        self.wanted = wanted
        self.pool = pool
        self.stop = stop
        self._tell = tell
        self._told_at = time.monotonic()
        self.began = began
        self.turns = Turns(wanted.parallel, lambda text: self.tell(Told(text)), changed=self._spread_threads)
        self.presence = presence or Presence(study.folder)
        self.failure: BaseException | None = None
        self._failures = 0
        self._ended = 0
        self._asking = threading.RLock()
        self._workers: dict[int, Worker] = {}
        self._at_work: dict[int, Any] = {}
        self.stands: dict[int, str] = {}
        """How far each trial at work is."""
        self._reclaimed_at = -_RECLAIM_SECONDS
        self._fits: bool | None = None if wanted.on_gpu and (wanted.parallel or 1) == 1 else True
        self._over = threading.Event()

    def run(self) -> None:
        """Returns when there are enough trials, or a stop was asked for and all have ended. Raises what ended a slot."""
        count = min(self._slots(), max(self.wanted.trials, 1))
        slots = [threading.Thread(target=self._slot, args=(number,), daemon=True) for number in range(count)]
        beat = threading.Thread(target=self._beat, daemon=True)
        beat.start()
        try:
            for slot in slots:
                slot.start()
            for slot in slots:
                while slot.is_alive():
                    slot.join(_LOOK_SECONDS)
        finally:
            self._over.set()
            beat.join(timeout=5.0)
            self.presence.close()
        if self.failure is not None:
            raise self.failure

    def tell(self, told: Told) -> None:
        """Says something to the person."""
        self._told_at = time.monotonic()
        self._tell(told)

    def asked(self, ask: Callable[[], Any]) -> Any:
        """What the storage gives, one question at a time and asked again while it is locked."""
        with self._asking:
            return patiently(
                self.study.place, ask, lambda text: self.tell(Told(text, "warning")), lambda: self.stop.asked
            )

    def ended(self, failure: str | None) -> None:
        """A trial has ended; failure: why it failed. Raises MachineError where too many in a row did."""
        self._failures = 0 if failure is None else self._failures + 1
        if self._failures >= _FAILURES_IN_A_ROW:
            raise MachineError(
                f"{self._failures} trials in a row failed, the last one so: {failure}; mend that and go on"
            )

    def serve(self, slot: int, worker: Worker) -> None:
        """From now on `worker` is that of a slot."""
        self._workers[slot] = worker

    def threads(self, recipe: Recipe) -> int | None:
        """Of a trial; None: as its recipe says."""
        if self.wanted.on_gpu or recipe.acceleration.threads != "auto" or (self.wanted.parallel or 1) == 1:
            return None
        return max(self.wanted.cpus // (self.wanted.parallel or 1), 1)

    def learnt_memory(self, gib: float | None) -> None:
        """What a trial holds of the card at most, once it has trained and validated."""
        if self._fits is None and (fits := fits_beside(gib, self.wanted.device_gib)) is not None:
            self._fits = fits
            if not fits:
                self.turns.does_not_fit(
                    f"one trial holds {gib:.1f} of the card's {self.wanted.device_gib:.1f} GiB, so that there is no room for "
                    "another beside it: one after another"
                )

    def _slots(self) -> int:
        if self.wanted.parallel is None:
            return 2
        return max(self.wanted.parallel, 2 if self.wanted.on_gpu else 1)

    def _spread_threads(self, training: int) -> None:
        """On a CPU trials share the cores, as far as the recipe leaves that open."""
        threads = self.wanted.base.recipe.acceleration.threads
        if self.wanted.on_gpu or self.wanted.parallel is not None or threads != "auto":
            return
        for worker in self._workers.values():
            worker.lines.send({"threads": max(self.wanted.cpus // max(training, 1), 1)})

    def _beat(self) -> None:
        """Signs of life, and the end of the hours."""
        beaten = 0.0
        while not self._over.wait(0.5):
            hours = self.wanted.hours
            if hours is not None and time.time() - self.began > hours * 3600:
                self.stop.ask(f"--hours {hours:g}", EXIT_DONE)
            if time.monotonic() - self._told_at > _SILENT_SECONDS and (stands := dict(self.stands)):
                self.tell(Told("; ".join(f"trial {number}: {text}" for number, text in sorted(stands.items()))))
            if time.monotonic() - beaten < HEARTBEAT_SECONDS:
                continue
            beaten = time.monotonic()
            self.presence.show()
            if self.study.place.kind == JOURNAL:
                continue
            for trial in list(self._at_work.values()):
                try:
                    self.study.optuna._storage.record_heartbeat(trial._trial_id)
                except Exception:
                    # The next one may come through; without any for a while others take the trial over
                    break

    def _slot(self, slot: int) -> None:
        worker = self.wanted.warm if slot == 0 else None
        try:
            while not self.stop.asked and self.failure is None:
                trial = self._next() if slot == 0 or self._beside() else None
                if trial is not None:
                    worker = self._carry_out(slot, trial, worker)
                elif not self._at_work and self._left() <= 0:
                    break
                else:
                    # What is at work now may die and have to go on
                    time.sleep(_IDLE_SECONDS)
        except BaseException as error:
            self.failure = self.failure or error
            self.stop.ask("an error of the search", EXIT_BUG)
        finally:
            if worker is not None:
                worker.lines.send({"end": True})
                worker.lines.close()

    def _beside(self) -> bool:
        """Whether a trial may get ready beside another: not while that one's rate alone is measured, unless it was too short."""
        return bool(self._fits) and (self.turns.knows_alone or self._ended > 0)

    def _left(self) -> int:
        """How many more trials may begin: those that wait to be gone on with are among the counted."""
        state = require_optuna().trial.TrialState
        trials = self.asked(lambda: self.study.optuna.get_trials(deepcopy=False))
        counted = counted_trials(trials)
        return self.wanted.trials - len(counted) + sum(trial.state == state.WAITING for trial in counted)

    def _next(self) -> Any | None:
        """A trial with its number, or None where there are enough."""
        with self._asking, taking(self.study.place, lambda: self.stop.asked):
            if time.monotonic() - self._reclaimed_at >= _RECLAIM_SECONDS:
                self._reclaimed_at = time.monotonic()
                for text in reclaim(self.study, self.presence.name, self.asked):
                    self.tell(Told(text, "warning"))
            if self.stop.asked or self._left() <= 0:
                return None
            trial = self.asked(self.study.optuna.ask)
            try:
                if self.study.place.kind != JOURNAL:
                    # Without any a machine that is gone a moment later would never be missed
                    self.asked(lambda: self.study.optuna._storage.record_heartbeat(trial._trial_id))
                self.asked(lambda: trial.set_user_attr("process", self.presence.name))
                self.asked(lambda: trial.set_user_attr("process_began", round(self.began, 3)))
            except require_optuna().exceptions.UpdateFinishedTrialError:
                # Drawing its values took so long that another machine took this process for dead
                return None
            if self._is_surplus(trial.number):
                self.asked(lambda: trial.set_user_attr(SURPLUS, True))
                self.asked(lambda: self.study.optuna.tell(trial, state=require_optuna().trial.TrialState.FAIL))
                return None
            self._at_work[trial.number] = trial
            return trial

    def _is_surplus(self, number: int) -> bool:
        """Of processes that ask at the same moment one may be too many: the last ones give up."""
        trials = self.asked(lambda: self.study.optuna.get_trials(deepcopy=False))
        counted = sorted(trial.number for trial in counted_trials(trials))
        return number not in counted[: self.wanted.trials]

    def _carry_out(self, slot: int, trial: Any, worker: Worker | None) -> Worker | None:
        """The worker, where it is fit for another trial."""
        try:
            return OneTrial(self, slot, trial).run(worker)
        finally:
            self.turns.released(slot)
            self._at_work.pop(trial.number, None)
            self.stands.pop(trial.number, None)
            self._ended += 1
