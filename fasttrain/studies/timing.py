"""Owns the timing of steps in their steady state: by the device's own events on a GPU, by the clock on a CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fasttrain.engine.together import steps_to_a_graph
from fasttrain.engine.trainer import StepReport, Trainer
from fasttrain.machine.ranks import ONLY_ONE, Ranks

_WARM_UP_BEHIND_A_GRAPH = 6
_WARM_UP_ON_CPU = 2
_REPEATS = 5
_REPEAT_SECONDS_ON_GPU, _REPEAT_SECONDS_ON_CPU = 0.3, 0.5
_MOST_SECONDS_ON_CPU = 5.0
_LEAST_REPEATS = 3
_MOST_SECONDS_FOR_AHEAD = 3.0
_LEAST_STEPS_ON_GPU, _MOST_STEPS = 4, 200
_HARMLESS = 1e-3
"""Of the learning rate: weights move, as in a run, and nothing diverges."""


@dataclass(frozen=True)
class Rates:
    """Patches/s of each repeat, and the share of all of them in which the trainer waited for data."""

    repeats: tuple[float, ...]
    wait_share: float

    @property
    def median(self) -> float:
        """Of the repeats."""
        return statistics.median(self.repeats)

    @property
    def best(self) -> float:
        """Of the repeats: what other processes took of a CPU is in none the least."""
        return max(self.repeats)

    @property
    def spread(self) -> float:
        """Half of the range of the repeats without the slowest, as a share of the median."""
        kept = sorted(self.repeats)[1:] or list(self.repeats)
        return (kept[-1] - kept[0]) / 2 / self.median


def endless(trainer: Trainer) -> Iterator[StepReport]:
    """Steps over the ends of epochs, at a rate that changes little."""
    peak = max(trainer.rate(step) for step in range(0, trainer.steps_per_epoch, max(trainer.steps_per_epoch // 8, 1)))
    trainer.rate = lambda step: peak * _HARMLESS
    while True:
        yield from trainer.steps()
        trainer.settle()
        trainer.begin_epoch()


def timed(
    reports: Iterator[StepReport],
    device: torch.device,
    warmed: Callable[[], None] = lambda: None,
    told: Callable[[int, int], None] = lambda done, total: None,
    ahead: int = 0,
    most_seconds: float | None = None,
    ranks: Ranks = ONLY_ONE,
) -> Rates:
    """Takes steps until they are steady, calls `warmed`, and measures stretches of them, fewer where a step takes long.

    ahead: batches that workers may have ready, which are used up first, as long as that takes a few seconds only. most_seconds:
    of it all, about, where steps are slow. ranks: those that take every step together; the first says how many, by its clock.
    """
    on_gpu = device.type == "cuda"
    told(0, _REPEATS + 1)
    limit = math.inf if most_seconds is None else most_seconds
    to_a_graph = steps_to_a_graph(ranks.place.ranks) + _WARM_UP_BEHIND_A_GRAPH
    _take(reports, to_a_graph if on_gpu else _WARM_UP_ON_CPU, limit / 4, ranks)
    _take(reports, ahead, min(_MOST_SECONDS_FOR_AHEAD, limit / 4), ranks)
    warmed()
    # Also the first steps after `warmed`, which may have given memory back
    for _ in range(2 if on_gpu else 0):
        next(reports)
    one = _seconds(reports, 2 if on_gpu else 1, device)[0] / (2 if on_gpu else 1)
    if on_gpu:
        steps = min(max(math.ceil(_REPEAT_SECONDS_ON_GPU / one), _LEAST_STEPS_ON_GPU), _MOST_STEPS)
        repeats = _REPEATS
        if most_seconds is not None:
            steps = min(steps, max(int(most_seconds / 2 / _REPEATS / one), 1))
            repeats = min(max(int(most_seconds / 2 / (one * steps)), _LEAST_REPEATS), _REPEATS)
    else:
        steps = max(math.ceil(_REPEAT_SECONDS_ON_CPU / one), 1)
        repeats = min(max(int(_MOST_SECONDS_ON_CPU / (one * steps)), _LEAST_REPEATS), _REPEATS)
    steps, repeats = ranks.share((steps, repeats))
    rates, waited, passed = [], 0.0, 0.0
    for number in range(repeats):
        told(number + 1, repeats + 1)
        seconds, patches, waiting = _seconds(reports, steps, device)
        rates.append(patches / seconds)
        waited += waiting
        passed += seconds
    return Rates(tuple(rates), min(waited / passed, 1.0))


def _take(reports: Iterator[StepReport], steps: int, most_seconds: float, ranks: Ranks) -> None:
    """So many steps, or fewer where they take longer."""
    began = time.perf_counter()
    for _ in range(steps):
        if ranks.share(time.perf_counter() - began > most_seconds):
            return
        next(reports)


def _seconds(reports: Iterator[StepReport], steps: int, device: torch.device) -> tuple[float, int, float]:
    """(seconds, patches, seconds of waiting) of so many steps."""
    patches, waiting = 0, 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    began = time.perf_counter()
    for _ in range(steps):
        report = next(reports)
        patches += report.patches
        waiting += report.wait_seconds
    if device.type == "cuda":
        last.record()
        torch.cuda.synchronize(device)
        return first.elapsed_time(last) / 1000, patches, waiting
    return time.perf_counter() - began, patches, waiting
