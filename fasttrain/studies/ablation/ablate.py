"""Owns `ablate`: its trials in turns, each in a process of its own, and the rows that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.errors import RecipeError
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.ablation.switches import PLAIN, SWITCHES, Facts, Switch
from fasttrain.studies.lock import applied
from fasttrain.studies.measuring import error_of
from fasttrain.studies.task import LOOK, STEPS, Outcome, Task
from fasttrain.studies.trials import Trials
from fasttrain.telemetry.events import Event, Message

FAST, PLAIN_ROW = "as decided", "plain"
BUDGET_SECONDS = 190.0
_LOOK_SECONDS = 24 * 3600.0
_COMPILING_SECONDS = 45.0
"""A compiled trial is expected to take so much longer than others."""
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


@dataclass
class Row:
    """One setting and its trials. base: the row that it is held against. changed: {key: value} from that row, and needs: what
    else has to be on for it.

    note: why there are no figures, or what else is not as it was asked for.
    """

    name: str
    base: str
    changed: Mapping[str, Any]
    compiled: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    note: str = ""
    skipped: bool = False

    @property
    def rates(self) -> list[float]:
        """Patches/s of each trial."""
        return [float(one.values["rate"]) for one in self.outcomes if one.done]

    @property
    def rate(self) -> float | None:
        """The median of the trials."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def start_seconds(self) -> float | None:
        """From the trial's begin to the end of its first step, in its first trial, when kernels are compiled if they must be."""
        return next((float(one.values["start_seconds"]) for one in self.outcomes if one.done), None)

    @property
    def range(self) -> tuple[float, float] | None:
        """The slowest and the fastest stretch of all trials, patches/s."""
        every = [float(rate) for one in self.outcomes if one.done for rate in one.values["repeats"]]
        return (min(every), max(every)) if every else None

    def median(self, key: str) -> float | None:
        """Of a value of the trials; None where none has it."""
        found = [float(one.values[key]) for one in self.outcomes if one.done and one.values.get(key) is not None]
        return statistics.median(found) if found else None


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
        self._longest = 0.0
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
        for number in range(_ROUNDS):
            if not self._round(number):
                return
        self.ended = f"{_ROUNDS} rounds were made"

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
        # Compiling takes longest, and is not to be what a budget always leaves out
        return sorted(rows, key=lambda row: not row.compiled)

    def _skip(self, row: Row, reason: str | None) -> None:
        if reason is not None:
            row.skipped, row.note = True, reason

    def _chosen(self) -> list[Switch]:
        return [switch for switch in SWITCHES if self.only is None or switch.name in self.only]

    def _round(self, number: int) -> bool:
        """One trial of every row; False where the time is over. The first one as decided was made before."""
        fast, plain, *others = self.rows
        for reference in (fast, plain):
            if not (number == 0 and reference is fast) and not self._affordable(reference):
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
        if left < self._longest + (_COMPILING_SECONDS if row.compiled and not warm else 0.0):
            self.ended = "the time for trials is over"
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
        limit = min(self.trial_seconds + (_COMPILING_SECONDS if row.compiled else 0.0), max(left, 0.0) + _OVER_SECONDS)
        if not self.facts:
            # Kernels may have to be compiled for the first time, and without this one there is nothing to tell
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
            self._longest = max(self._longest, self.clock() - began)
        self._note(row, outcome)
        told = f"{outcome.values['rate']:.1f} patches/s" if outcome.done else row.note
        self.emit(Message(f"{_long_name(row)}: {told} ({outcome.seconds:.1f} s)"))
        self.found()

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


def _long_name(row: Row) -> str:
    return row.name if row.name == row.base else f"{row.name} alone, from {row.base}"


def read_only(texts: list[str] | None) -> tuple[str, ...] | None:
    """`--only amp,compile` → names of switches; raises RecipeError for one that there is not."""
    from fasttrain.recipe.names import did_you_mean

    if not texts:
        return None
    names = tuple(switch.name for switch in SWITCHES)
    asked = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    wrong = [word for word in asked if word not in names]
    if wrong:
        raise RecipeError([f"--only {word}: there is no such switch{did_you_mean(word, names)}" for word in wrong])
    if not asked:
        raise RecipeError(f"--only: should name switches, such as amp,compile; there are {', '.join(names)}")
    return tuple(asked)


__all__ = ["Ablation", "Facts", "Row", "read_only"]
