"""Owns what a profile concludes: what holds the run back, with the figures that show it, and what each change would gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DATA, LAUNCH, BANDWIDTH, COMPUTE, VALIDATION = (
    "data-bound",
    "launch-bound",
    "bandwidth-bound",
    "compute-bound",
    "validation-bound",
)
_MOSTLY = 0.5
_IDLE = 0.25
"""Of the time of steps that wait for nothing: so much without a kernel is the host's slowness to launch them."""
_WORTH = 0.02
_COMPUTING = ("conv",)


@dataclass(frozen=True)
class Evidence:
    """The measured seconds that a verdict is made of. A step is one of the optimiser.

    real, same, loader: a step with real data, over one batch again and again, and the loader alone. made: making a step's batches
    in one process, by the clock, and made_cpu: of a CPU; None where the device makes them. step_cpu: a step of one batch, of all
    CPUs together. validating: of an epoch on average. kinds: {kind: share of the step's time on the device}, idle with it.
    """

    real: float
    same: float
    loader: float
    steps_per_epoch: int
    validating: float
    kinds: Mapping[str, float]
    on_gpu: bool
    workers: int
    cpus: int
    step_cpu: float = 0.0
    made: float | None = None
    made_cpu: float = 0.0

    @property
    def epoch(self) -> float:
        """Seconds of an epoch with its share of validation."""
        return self.steps_per_epoch * self.real + self.validating

    @property
    def overlaps(self) -> bool:
        """Whether batches are made beside the step."""
        return self.workers > 0 and self.made is not None

    @property
    def ready(self) -> float:
        """Seconds of a step whose batch is there. Where batches are made between the steps it is at least a real one less them:
        the two would else differ by what other processes took.
        """
        return self.same if self.overlaps else min(max(self.same, self.real - self.loader), self.real)

    def with_step(self, share: float) -> float:
        """Seconds of a real step where one of a batch that lies ready takes that share of what it does now."""
        after = share * self.ready
        return max(self.real - self.ready + after, after, self.loader if self.overlaps else 0.0)

    def with_workers(self, count: int) -> float:
        """Seconds of a real step with so many workers: that of the slower of step and workers, or the CPUs' whole work."""
        assert self.made is not None
        return max(self.ready, self.made / count, (self.made_cpu + self.step_cpu) / self.cpus)


@dataclass(frozen=True)
class Verdict:
    """One of the five words, and the sentences that show it."""

    bound: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A setting, what it gains in training throughput (0.25: a quarter more patches/s) and in epochs, and how that is known."""

    setting: str
    gain: float
    epoch_gain: float
    how: str


def judge(found: Evidence) -> Verdict:
    """What takes most of an epoch's time."""
    shares = _shares(found)
    training = found.steps_per_epoch * found.real
    if found.validating > _MOSTLY * found.epoch:
        told = f"an epoch trains for {training:.3g} s and validates for {found.validating:.3g} s on average"
        return Verdict(VALIDATION, (told, shares))
    if found.loader > found.same and found.real > found.same:
        more = found.real / found.ready - 1
        told = (
            f"a step takes {_ms(found.real)} with real data and {_ms(found.same)} over one batch again and again, while the "
            f"loader alone needs {_ms(found.loader)} for the batches of a step: data that took no time would give {more:+.0%}"
        )
        return Verdict(DATA, (told,))
    told = (
        f"a step takes {_ms(found.real)} with real data, {_ms(found.same)} of it over one batch again and again; the "
        f"loader alone would need {_ms(found.loader)}"
    )
    idle = found.kinds.get("idle", 0.0)
    if found.on_gpu and idle > _IDLE:
        why = f"with its batch ready the GPU does nothing for {idle:.0%} of a step: kernels end faster than they are launched"
        return Verdict(LAUNCH, (told, why))
    moving = sum(share for kind, share in found.kinds.items() if kind not in (*_COMPUTING, "idle"))
    if moving > _MOSTLY:
        return Verdict(BANDWIDTH, (told, shares))
    return Verdict(COMPUTE, (told, shares))


def _shares(found: Evidence) -> str:
    ordered = sorted(found.kinds.items(), key=lambda pair: -pair[1])
    device = "GPU" if found.on_gpu else "CPU"
    named = [
        f"{'nothing of torch’s' if kind == 'idle' and not found.on_gpu else kind} {share:.0%}"
        for kind, share in ordered
    ]
    return f"of a step's time the {device} spends on {', '.join(named)}" if named else "no operation was seen"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def changed(found: Evidence, setting: str, step: float, how: str, validating: float | None = None) -> Change:
    """The change to a real step of so many seconds, or to so much validation an epoch."""
    epoch = found.steps_per_epoch * step + (found.validating if validating is None else validating)
    return Change(setting, found.real / step - 1, found.epoch / epoch - 1, how)


def data_changes(found: Evidence, cached: float | None = None) -> list[Change]:
    """More or fewer workers, and volumes kept in memory; cached: seconds of making a step's batches from these, where they are
    read each time now.
    """
    if found.made is None:
        return []
    changes = []
    counts = sorted({1, max(found.cpus // 2, 1), found.cpus, 2 * found.cpus} - {found.workers})
    best = min(counts, key=lambda count: (round(found.with_workers(count) / found.ready, 2), count))
    how = (
        f"reckoned: a batch takes {_ms(found.made)} to make in one process ({_ms(found.made_cpu)} of a CPU), beside a step of "
        f"{_ms(found.ready)}"
    )
    changes.append(changed(found, f"data.workers: {best}", found.with_workers(best), how))
    if cached is not None:
        workers = max(found.workers, 1)
        step = found.real - (found.made - cached) / workers
        floor = max(found.ready + (0.0 if found.workers else cached), cached / workers)
        how = f"reckoned: without reading a batch takes {_ms(cached)} to make, and not {_ms(found.made)}"
        changes.append(changed(found, "data.cache.kind: memory", max(step, floor), how))
    return changes


def validation_changes(found: Evidence, every: int) -> list[Change]:
    """Fewer validations, where they take time."""
    if not found.validating:
        return []
    how = "reckoned: half as many validations"
    return [changed(found, f"validation.every: {2 * every}", found.real, how, found.validating / 2)]


def best_two(changes: Sequence[Change]) -> list[Change]:
    """Those that gain most in an epoch, none that gains hardly anything."""
    ordered = sorted(changes, key=lambda change: -change.epoch_gain)
    return [change for change in ordered if change.epoch_gain > _WORTH and math.isfinite(change.epoch_gain)][:2]


def most_to_gain(found: Evidence) -> dict[str, float]:
    """Epochs' gain if a part took no time at all, and if the step took half: more no setting can give."""
    without = {
        "data that took no time": found.steps_per_epoch * min(found.ready, found.real) + found.validating,
        "a network that took half": found.steps_per_epoch * found.with_step(0.5) + found.validating,
        "no validation": found.steps_per_epoch * found.real,
    }
    return {name: max(found.epoch / seconds - 1, 0.0) for name, seconds in without.items() if seconds > 0}
