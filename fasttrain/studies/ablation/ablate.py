"""Owns `ablate`: its trials in turns, each in a process of its own, and the rows that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.errors import RecipeError
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.ablation.rows import FAST, PLAIN_ROW, Row
from fasttrain.studies.ablation.switches import PLAIN, SWITCHES, Facts, Switch
from fasttrain.studies.lock import applied
from fasttrain.studies.measuring import error_of
from fasttrain.studies.task import LOOK, STEPS, Outcome, Task
from fasttrain.studies.trials import Trials
from fasttrain.telemetry.events import Event, Message

BUDGET_SECONDS = 190.0
_LOOK_SECONDS = 24 * 3600.0
_COMPILING_SECONDS = 45.0
"""A compiled trial is expected to take so much longer than others."""
_KERNELS_SECONDS = 60.0
"""The first trial of a setting whose kernels are compiled by Triton may take so much longer: many shapes, each from nothing."""
_OVER_SECONDS = 30.0
"""A trial that has begun may go on for so long after the budget's end."""
_CASES = 8
"""So many training cases are read for a trial."""
_MOST_SECONDS = 12.0
"""Of the steps of a trial, where they are slow."""
_ROUNDS = 4
_REFERENCE_EVERY = 6
"""After so many trials the two references are measured again, so that what drifts shows in their spread."""
_MEASURED_STEP = ("amp", "channels_last")
_COMPILED = ("fused_layers", "compile")
TIME_IS_OVER = "the time for trials is over"


class Ablation:
    """Rows fill as it goes, and `found` is called after each trial, so that an interruption leaves the table so far."""

    def __init__(
        self,
        resolved: ResolvedRecipe,
        data: Path | None,
        device: str,
        trials: Trials,
        budget_seconds: float,
        trial_seconds: float,
        emit: Callable[[Event], None],
        only: tuple[str, ...] | None = None,
        found: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved = resolved
        self.data = None if data is None else str(data.absolute())
        self.device = device
        self.trials = trials
        self.budget_seconds = budget_seconds
        self.trial_seconds = trial_seconds
        self.emit = emit
        self.only = only
        self.found = found
        self.clock = clock
        self.machine: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.ended = ""
        self._decided: dict[str, Any] = {}
        self._began = clock()
        self._longest: dict[str, float] = {}
        self._since = 0
        self._count = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the trials use one."""
        return self.machine.get("gpu_bytes") is not None

    def look(self) -> None:
        """Finds and checks the cases, and surveys the machine; the budget begins behind it."""
        outcome = self.trials.run(self._task(LOOK, self.resolved, False), "look", _LOOK_SECONDS)
        if not outcome.done:
            raise error_of(outcome, "looking at data and machine")
        self.machine = outcome.values["machine"]
        self._began = self.clock()

    def run(self) -> None:
        """All trials that the budget has room for. Raises the error of the decided run where that one fails, and Stopped."""
        if not self.machine:
            self.look()
        first = Row(FAST, FAST, {})
        self.rows = [first]
        self._trial(first)
        outcome = first.outcomes[-1]
        if not outcome.done:
            raise error_of(outcome, "the run as it is decided")
        self.facts = self._facts(outcome)
        # Later trials need not measure what was measured here, and must not choose otherwise
        self._decided = {f"acceleration.{name}": _word(self.facts[name]) for name in _MEASURED_STEP}
        self.rows += [Row(PLAIN_ROW, PLAIN_ROW, {}), *self._off_rows(), *self._on_rows()]
        if not self._first_round():
            return
        for _ in range(1, _ROUNDS):
            if not self._round():
                return
        self.ended = f"{_ROUNDS} rounds were made"

    def needed(self) -> tuple[float, str] | None:
        """Seconds of a budget that would have had room for what was left out, by what trials took, and what that is; None where
        nothing was.
        """
        if self.ended != TIME_IS_OVER:
            return None
        spent = sum(one.seconds for row in self.rows for one in row.outcomes)
        able = [row for row in self.rows if not row.skipped and all(one.done for one in row.outcomes)]
        missing = [row for row in able if not row.outcomes]
        if missing:
            return spent + sum(self._expected(row) for row in missing) + self._slowest, "every row once"
        more = sum((_ROUNDS - len(row.outcomes)) * self._expected(row) for row in able if len(row.outcomes) < _ROUNDS)
        return (spent + more + self._slowest, f"{_ROUNDS} trials of every row") if more else None

    def _expected(self, row: Row) -> float:
        """Seconds of a trial of this row, by its own, else by those that are held against the same one, else by all."""
        done = [(other, one.seconds) for other in self.rows if not other.compiled for one in other.outcomes if one.done]
        own = [one.seconds for one in row.outcomes[-1:]]
        alike = [seconds for other, seconds in done if other.base == row.base]
        cold = row.compiled and not own
        return statistics.median(own or alike or [seconds for _, seconds in done]) + _COMPILING_SECONDS * cold

    @property
    def _slowest(self) -> float:
        return max(self._longest.values(), default=0.0)

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        values = outcome.values
        return {
            **values["plan"],
            "on_gpu": self.on_gpu,
            "reasons": values.get("reasons", {}),
        }

    def _off_rows(self) -> list[Row]:
        rows = []
        for switch in self._chosen():
            row = Row(f"{switch.name} off", FAST, {switch.key: switch.off})
            self._skip(row, switch.off_in(self.facts))
            rows.append(row)
        return rows

    def _on_rows(self) -> list[Row]:
        rows = []
        for switch in self._chosen():
            compiled = switch.name == "compile"
            row = Row(f"{switch.name} on", PLAIN_ROW, {switch.key: switch.on(self.facts)}, compiled, dict(switch.needs))
            self._skip(row, switch.on_in(self.facts))
            rows.append(row)
        # Compiling takes longest: in its time several others are measured
        return sorted(rows, key=lambda row: row.compiled)

    def _skip(self, row: Row, reason: str | None) -> None:
        if reason is not None:
            row.skipped, row.note = True, reason

    def _chosen(self) -> list[Switch]:
        return [switch for switch in SWITCHES if self.only is None or switch.name in self.only]

    def _first_round(self) -> bool:
        """One trial of every row, before any comes again: first what each acceleration gives to the run as decided, which was
        measured before. False where the time is over.
        """
        _, plain, *others = self.rows
        off, on = ([row for row in others if row.base == base and not row.skipped] for base in (FAST, PLAIN_ROW))
        for row in (*off, plain, *on):
            if not self._affordable(row) and not row.compiled:
                return False
        self._since = 0
        return True

    def _round(self) -> bool:
        """One more trial of every row, in turns with the two references; False where the time is over."""
        fast, plain, *others = self.rows
        for reference in (fast, plain):
            if not self._affordable(reference):
                return False
        for row in others:
            if row.skipped or (row.outcomes and not row.outcomes[-1].done):
                continue
            if self._since >= _REFERENCE_EVERY:
                self._since = 0
                for reference in (fast, plain):
                    if not self._affordable(reference):
                        return False
            if not self._affordable(row) and not row.compiled:
                return False
        return True

    def _affordable(self, row: Row) -> bool:
        """Makes the trial where the budget has room for it; False where not, which the row says if it has no figures."""
        left = self.budget_seconds - (self.clock() - self._began)
        warm = any(one.done for one in row.outcomes)
        expected = self._longest.get(row.base, self._slowest)
        if left < expected + (_COMPILING_SECONDS if row.compiled and not warm else 0.0):
            self.ended = TIME_IS_OVER
            for one in self.rows:
                if not one.outcomes and not one.skipped and (one is row or not row.compiled):
                    one.note = "left out: the time for trials was over; raise --budget"
            return False
        self._trial(row)
        return True

    def _trial(self, row: Row) -> None:
        settings = {**(PLAIN if row.base == PLAIN_ROW else self._decided), **row.needs, **row.changed}
        self._count += 1
        left = self.budget_seconds - (self.clock() - self._began)
        more = self._compiling_seconds(row)
        limit = min(self.trial_seconds + more, max(left, 0.0) + _OVER_SECONDS + more)
        if not self.facts:
            # Without this one there is nothing to tell
            limit = max(limit, self.trial_seconds)
        began = self.clock()
        name = f"{self._count:02d}-{row.name.replace(' ', '-')}"
        try:
            resolved = applied(self.resolved, settings) if settings else self.resolved
            outcome = self.trials.run(self._task(STEPS, resolved, True), name, limit)
        except RecipeError as error:
            outcome = Outcome("failed", faults=error.faults, exit_code=error.exit_code)
        row.outcomes.append(outcome)
        self._since += 1
        if not row.compiled and row.name != FAST:
            # The first one also measures what the others are given
            self._longest[row.base] = max(self._longest.get(row.base, 0.0), self.clock() - began)
        self._note(row, outcome)
        told = f"{outcome.values['rate']:.1f} patches/s" if outcome.done else row.note
        self.emit(Message(f"{row.long_name}: {told} ({outcome.seconds:.1f} s)"))
        self.found()

    def _compiling_seconds(self, row: Row) -> float:
        """That this trial may take longer than others, since kernels are compiled in it."""
        asked = {**row.needs, **row.changed}
        if row.outcomes:
            return _COMPILING_SECONDS if row.compiled else 0.0
        if row.base == FAST:
            by = [self.facts.get(name, True) and asked.get(f"acceleration.{name}") != "off" for name in _COMPILED]
        else:
            by = [asked.get(f"acceleration.{name}") == "on" for name in _COMPILED]
        kernels = _KERNELS_SECONDS if self.on_gpu and any(by) else 0.0
        return max(kernels, _COMPILING_SECONDS if row.compiled else 0.0)

    def _note(self, row: Row, outcome: Outcome) -> None:
        if not outcome.done:
            row.note = {"memory": "out of memory"}.get(
                outcome.status, outcome.faults[0] if outcome.faults else "failed"
            )
            return
        plan, reasons = outcome.values["plan"], outcome.values.get("reasons", {})
        notes = list(outcome.values.get("warnings", ()))
        if row.needs:
            notes.append(
                f"with {', '.join(f'{key.rpartition(chr(46))[2]} {value}' for key, value in row.needs.items())}, which it needs"
            )
        for switch in SWITCHES:
            if switch.key in row.changed and not _same(plan.get(switch.name), row.changed[switch.key]):
                notes.append(f"could not be applied: {reasons.get(switch.name, 'the plan has it otherwise')}")
        if row.base == FAST and row.changed:
            followed = [
                f"{switch.name} {_word(plan.get(switch.name))}"
                for switch in SWITCHES
                if switch.key not in row.changed
                and plan.get(switch.name) != self.facts.get(switch.name)
                and switch.name not in ("workers", "pin_memory", "copy_stream")
            ]
            if followed:
                notes.append(f"with it {', '.join(followed)}")
        row.note = "; ".join(notes)

    def _task(self, kind: str, resolved: ResolvedRecipe, compiled: bool) -> Task:
        text = resolved.recipe.model_dump_json()
        return Task(kind, text, self.data, self.device, compiled=compiled, cases=_CASES, most_seconds=_MOST_SECONDS)


def _word(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _same(planned: Any, wanted: Any) -> bool:
    return planned is None or _word(planned) == wanted


__all__ = ["Ablation", "Facts"]
