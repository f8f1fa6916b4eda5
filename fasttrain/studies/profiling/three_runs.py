"""Owns the three runs that part a step's time: real data, one batch again and again, and the loader alone, taken in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fasttrain.engine.captured import STEPS_BEFORE
from fasttrain.engine.trainer import Trainer
from fasttrain.samples import Batch, BatchSource
from fasttrain.studies.timing import endless

_WARM_UP_ON_GPU, _WARM_UP_ON_CPU = STEPS_BEFORE + 6, 1
_ROUNDS = 5
_SECONDS_ON_GPU, _SECONDS_ON_CPU = 0.3, 0.4
"""Of a stretch of one of the runs."""
_MOST_SECONDS = 24.0
"""Of all rounds together, where a step takes long; three are made at least."""
_LEAST_ROUNDS = 3
_MOST_STEPS = 200
_MOST_SECONDS_FOR_AHEAD = 5.0
_SLOW_RATE = 1e-3


@dataclass(frozen=True)
class Pace:
    """Seconds a step of one run, a value a round."""

    rounds: tuple[float, ...]
    on_gpu: bool

    @property
    def seconds(self) -> float:
        """The median; on a CPU the least, since what other processes took is in none less."""
        return statistics.median(self.rounds) if self.on_gpu else min(self.rounds)

    @property
    def spread(self) -> float:
        """Half the range as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / 2 / statistics.median(self.rounds)


@dataclass(frozen=True)
class ThreeRuns:
    """Seconds a step with real data, of one batch again and again, and of the loader alone; `waits`: the share of the first in
    which the trainer waited for its batch; step_cpu_seconds: what a step of one batch takes of all CPUs together.
    """

    real: Pace
    same: Pace
    loader: Pace
    waits: float
    step_cpu_seconds: float


class OneStream:
    """A BatchSource whose only stream is read by the trainer and, between its steps, by whoever measures the loader alone."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.stream = source.batches(0)

    @property
    def waited_for(self) -> bool:
        """As the source has it."""
        return self.source.waited_for

    def batches(self, first_position: int, alike: bool = False) -> Iterator[Batch]:
        """The stream where it is."""
        return self.stream

    def close(self) -> None:
        """Closes the source."""
        self.source.close()


class Stretches:
    """Takes stretches of each of the runs with a trainer whose source is `stream`. ahead: batches a worker may have ready."""

    def __init__(self, trainer: Trainer, stream: OneStream, device: torch.device, workers: int, ahead: int) -> None:
        self.trainer = trainer
        self.stream = stream
        self.device = device
        self.workers = workers
        self.ahead = workers * ahead
        self.reports = endless(trainer)
        self._rate = trainer.rate(0) * _SLOW_RATE
        self._same = [next(stream.stream) for _ in range(trainer.step.accumulate)]

    def real(self, steps: int) -> float:
        """Seconds of waiting in so many steps of the real run."""
        return sum(next(self.reports).wait_seconds for _ in range(steps))

    def same(self, steps: int) -> None:
        """So many steps over one and the same batch."""
        for _ in range(steps):
            self.trainer.step(iter(self._same), self._rate)

    def loader(self, steps: int) -> None:
        """The batches of so many steps, with which nothing is done."""
        for _ in range(steps * self.trainer.step.accumulate):
            next(self.stream.stream)

    def use_up(self) -> None:
        """Takes what workers made ahead while nobody asked, so that it is not counted as made in no time."""
        began = time.perf_counter()
        for _ in range(self.ahead):
            if time.perf_counter() - began > _MOST_SECONDS_FOR_AHEAD:
                return
            next(self.stream.stream)

    def settle(self, name: str) -> None:
        """Brings workers to the pace that they keep in a run of this name."""
        if name == "same" or not self.workers:
            return
        self.use_up()
        if name == "real":
            # A stretch ends behind a step, and so must what lies before it
            self.real(self.workers)

    def seconds(self, run: Callable[[int], object], steps: int) -> float:
        """Of a stretch, the device waited for at both ends."""
        self._wait()
        began = time.perf_counter()
        run(steps)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def three_runs(runs: Stretches, told: Callable[[int, int], None] = lambda done, total: None) -> ThreeRuns:
    """Measures the runs in turns, a stretch of each a round, so that a burst of other work slows all of a round."""
    on_gpu = runs.device.type == "cuda"
    told(0, _ROUNDS + 1)
    runs.real(_WARM_UP_ON_GPU if on_gpu else _WARM_UP_ON_CPU)
    kinds: dict[str, Callable[[int], object]] = {"same": runs.same, "real": runs.real, "loader": runs.loader}
    wanted = _SECONDS_ON_GPU if on_gpu else _SECONDS_ON_CPU
    steps = {}
    for name, run in kinds.items():
        runs.settle(name)
        # Batches of workers come together, so that fewer than one of each tell nothing of their pace
        few = 1 if name == "same" else max(runs.workers, 1)
        one = max(runs.seconds(run, few) / few, 1e-6)
        if few == 1 and one < wanted:
            # The first one may have had more to do
            one = max(runs.seconds(run, 2) / 2, 1e-6)
        steps[name] = min(max(math.ceil(wanted / one), 2 if on_gpu else 1), _MOST_STEPS)
        if name != "same" and runs.workers:
            # Workers that began together end together: a stretch is to hold as many batches of each
            steps[name] = math.ceil(steps[name] / runs.workers) * runs.workers
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    waited, cpu, began = 0.0, [], time.perf_counter()
    for number in range(_ROUNDS):
        passed = time.perf_counter() - began
        if number >= _LEAST_ROUNDS and passed + passed / number > _MOST_SECONDS:
            break
        told(number + 1, _ROUNDS + 1)
        for name, run in kinds.items():
            runs.settle(name)
            used = time.process_time()
            if name == "real":
                waits: list[float] = []
                seconds = runs.seconds(lambda count, waits=waits: waits.append(runs.real(count)), steps[name])  # type: ignore[misc]
                waited += sum(waits) / seconds
            else:
                seconds = runs.seconds(run, steps[name])
            if name == "same":
                cpu.append((time.process_time() - used) / steps[name])
            taken[name].append(seconds / steps[name])
    paces = {name: Pace(tuple(values), on_gpu) for name, values in taken.items()}
    share = min(waited / len(paces["real"].rounds), 1.0)
    return ThreeRuns(paces["real"], paces["same"], paces["loader"], share, min(cpu))
