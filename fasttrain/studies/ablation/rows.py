"""Owns a row of an ablation's table: one setting, what it is held against, and its trials."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fasttrain.studies.task import Outcome

FAST, PLAIN_ROW = "as decided", "plain"


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

    @property
    def long_name(self) -> str:
        """With what it is switched on or off from."""
        return self.name if self.name == self.base else f"{self.name} alone, from {self.base}"
