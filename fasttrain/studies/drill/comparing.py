"""Owns the comparison of runs step by step: bit for bit on a CPU, on a GPU within what two unbroken runs differ by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttrain.telemetry.event_log import read_events
from fasttrain.telemetry.metrics_csv import read_metrics

Losses = dict[int, float | None]
"""{step: loss}; None where it was not finite."""
SPREADS = 4.0
"""A run may lie so many times as far off as two unbroken runs do: of three draws of one and the same rounding."""
ROUNDING = 2e-3
"""Of the loss: what a run may differ by in any case, where two unbroken runs happened to agree."""
_TIMED = ("seconds", "patches_per_second", "wait_share", "gpu_util", "gpu_gib")


@dataclass(frozen=True)
class Difference:
    """Where a run first is not what it should be; step: after so many steps."""

    step: int
    text: str


def losses_of(run: Path) -> tuple[Losses, Difference | None]:
    """The losses of a run, and the first step that was taken twice with two losses, if there is one."""
    found: Losses = {}
    twice: Difference | None = None
    for record in read_events(run / "events.jsonl"):
        if record.get("event") != "StepLogged":
            continue
        step, loss = record.get("step"), record.get("loss")
        if not isinstance(step, int):
            continue
        if step in found and found[step] != loss and twice is None:
            twice = Difference(step, f"its loss was {found[step]!r}, and {loss!r} when it was taken again")
        found[step] = loss
    return found, twice


def first_difference(unbroken: Path, broken: Path) -> Difference | None:
    """Bit for bit: losses, those of steps that were taken twice, and the rows of metrics.csv but for their times."""
    (expected, _), (found, twice) = losses_of(unbroken), losses_of(broken)
    differing = [
        Difference(step, f"its loss is {_shown(found, step)}, and {_shown(expected, step)} in the unbroken run")
        for step in sorted({**expected, **found})
        if step not in expected or step not in found or expected[step] != found[step]
    ]
    rows = _rows(unbroken), _rows(broken)
    for epoch in sorted({**rows[0], **rows[1]}):
        one, other = rows[0].get(epoch), rows[1].get(epoch)
        if one != other:
            name, text = _column(one, other)
            differing.append(Difference(int((one or other or {}).get("step") or 0), f"{name} of epoch {epoch} {text}"))
            break
    return min([*([twice] if twice else []), *differing], key=lambda one: one.step, default=None)


@dataclass(frozen=True)
class Spread:
    """How far runs lie apart: at most, as a share of the loss, two unbroken ones, and the broken one from the nearer of them."""

    unbroken: float
    broken: float


def difference_beyond_spread(unbroken: tuple[Path, Path], broken: Path) -> tuple[Spread, Difference | None]:
    """On a GPU, where rounding differs from run to run and grows with the steps: the first step where the broken run lies further
    from both unbroken ones than `SPREADS` times their own greatest distance until then, and than `ROUNDING`.
    """
    (one, _), (other, _), (found, _) = losses_of(unbroken[0]), losses_of(unbroken[1]), losses_of(broken)
    widest = own = 0.0
    first: Difference | None = None
    for step in sorted({**one, **found}):
        expected, second, loss = one.get(step), other.get(step), found.get(step)
        if expected is None or second is None or loss is None:
            if step not in found or step not in one or (loss is None) != (expected is None and second is None):
                first = first or Difference(
                    step, f"its loss is {_shown(found, step)}, and {_shown(one, step)} in an unbroken run"
                )
            continue
        scale = max(abs(expected), math.ulp(1.0))
        widest = max(widest, abs(expected - second) / scale)
        apart = min(abs(loss - expected), abs(loss - second)) / scale
        own = max(own, apart)
        if apart > max(SPREADS * widest, ROUNDING) and first is None:
            text = f"its loss is {loss!r}, and {expected!r} and {second!r} in two unbroken runs"
            first = Difference(step, text)
    return Spread(widest, own), first


def _rows(run: Path) -> dict[int, dict[str, float | None]]:
    rows = read_metrics(run / "metrics.csv")
    return {int(row["epoch"] or 0): {key: row[key] for key in row if key not in _TIMED} for row in rows}


def _column(one: Mapping[str, float | None] | None, other: Mapping[str, float | None] | None) -> tuple[str, str]:
    if one is None or other is None:
        return "the row", "is in one of the two runs alone"
    name = next(key for key in one if one[key] != other.get(key))
    return name, f"is {other.get(name)!r}, and {one[name]!r} in the unbroken run"


def _shown(losses: Losses, step: int) -> str:
    return json.dumps(losses[step]) if step in losses else "not there"
