"""Owns what a trial is asked and what it answers, as plain values that travel between processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LOOK, STEPS, VALIDATION = "look", "steps", "validation"


@dataclass(frozen=True)
class Task:
    """One trial. `recipe` is the JSON text of a checked recipe.

    kind: `look` finds and checks the cases and surveys the machine; `steps` measures training steps; `validation` predicts and
    scores the largest validation case beside a training that has begun. former: the plan of an earlier trial on a CPU, whose
    precision and layout stand. compiled: the plan's torch.compile is followed, else left out. ceilings: also count the network's
    work and measure what the device does at most. cases: so many training cases are read. most_seconds: steps that are slow are
    measured for no longer than about this; None: as long as it takes to have enough of them. ranks: processes that take the steps
    together, a device each, as `train --gpus` has them.
    """

    kind: str
    recipe: str
    data: str | None
    device: str
    former: dict[str, Any] | None = None
    former_device: str | None = None
    compiled: bool = False
    ceilings: bool = False
    cases: int = 16
    most_seconds: float | None = None
    ranks: int = 1

    @property
    def processes(self) -> int:
        """That carry it out: looking is the first rank's alone."""
        return 1 if self.kind == LOOK else self.ranks

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """How a trial's process ended.

    status: `done`, `memory` (it ran out), `hung` (its time was over) or `failed`. values: what it measured. faults: its error's
    sentences. exit_code: of that error, as the command line has it. log: what it wrote to stdout and stderr. rank: of several the
    one that it ended by; None: it has one, or ended well.
    """

    status: str
    values: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    exit_code: int = 0
    seconds: float = 0.0
    log: str = ""
    rank: int | None = None

    @property
    def done(self) -> bool:
        """Whether there are figures."""
        return self.status == "done"
