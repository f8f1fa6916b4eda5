"""Owns what a drill found: each kill and what it cost, the time of a save, and whether the run is what it would have been."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fasttrain.studies.drill.comparing import Difference, Spread
from fasttrain.studies.drill.life import Life


@dataclass(frozen=True)
class Kill:
    """One kill. moment: what the run was at. step: the last one it had logged (0: none yet), resumed_step: the one it went on
    from. lost_seconds: of training, from that step to the kill. restart_seconds: from the start of the next process to its
    first step; None where that one was killed before.
    """

    moment: str
    step: int
    resumed_step: int
    lost_seconds: float
    restart_seconds: float | None

    @property
    def lost_steps(self) -> int:
        """Steps that were taken again."""
        return self.step - self.resumed_step

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "lost_steps": self.lost_steps}


@dataclass
class Report:
    """What a drill found.

    save_seconds: of each checkpoint, pause_seconds: for which the training stood still. expected_loss_seconds: what a kill may
    cost with the recipe's own `output.checkpoint_every`, at the pace that was measured. spread: on a GPU alone. kept: where the
    small files of runs that differ lie.
    """

    recipe: str
    checkpoint_every: str
    wanted_kills: int
    device: str = ""
    steps: int = 0
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)
    pause_seconds: list[float] = field(default_factory=list)
    checkpoint_mib: float = 0.0
    expected_loss_seconds: float | None = None
    spread: Spread | None = None
    difference: Difference | None = None
    kept: str | None = None
    seconds: float = 0.0

    @property
    def worst(self) -> Kill | None:
        """The kill that cost most of the training."""
        return max(self.kills, key=lambda kill: kill.lost_seconds, default=None)

    def note_saves(self, life: Life) -> None:
        """Takes in what a life told of its checkpoints."""
        for record in life.saves:
            self.save_seconds.append(float(record["seconds"]))
            self.pause_seconds.append(float(record.get("pause_seconds") or 0.0))
            self.checkpoint_mib = float(record["mib"])

    def record(self) -> dict[str, Any]:
        """For JSON."""
        worst = self.worst
        return {
            **asdict(self),
            "status": "same" if self.difference is None else "different",
            "kills": [kill.record() for kill in self.kills],
            "worst_loss": None if worst is None else {"steps": worst.lost_steps, "seconds": worst.lost_seconds},
            "save_seconds": _summary(self.save_seconds),
            "pause_seconds": _summary(self.pause_seconds),
        }


def _summary(seconds: Sequence[float]) -> dict[str, float | int] | None:
    if not seconds:
        return None
    return {"median": statistics.median(seconds), "most": max(seconds), "count": len(seconds)}


def kills_of(lives: Sequence[Life], moments: Sequence[str], at: Sequence[float], step_seconds: float) -> list[Kill]:
    """The kills of a run from its lives, the last of which went to the end; at: when the others were killed."""
    found = []
    for number, (life, moment, time) in enumerate(zip(lives, moments, at, strict=False)):
        # A life that was killed at its start told nothing; the next one goes on from the same checkpoint
        after = [other for other in lives[number + 1 :] if other.started]
        resumed = (after[0].resumed_step or 0) if after else life.resumed_step or 0
        step, lost = resumed, 0.0
        if life.times:
            step = life.step
            since = life.times.get(resumed, min(life.times.values()) - step_seconds)
            lost = max(time - since, 0.0)
        restart = lives[number + 1].first_step_seconds if number + 1 < len(lives) else None
        found.append(Kill(moment, step, resumed, lost, restart))
    return found
