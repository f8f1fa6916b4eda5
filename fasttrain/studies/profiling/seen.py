"""Owns what is seen of a step from inside: named parts, kinds of kernels, a trace, and its batch made in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fasttrain.batches import LoaderSource
from fasttrain.data.caches import estimate_bytes
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import Split
from fasttrain.engine.build import Assembly
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.validation_memory import prepare_validation
from fasttrain.errors import StorageError
from fasttrain.ranges import listening
from fasttrain.recipe import Recipe
from fasttrain.samples import BatchSource, Case
from fasttrain.studies.profiling.kernels import Breakdown, breakdown
from fasttrain.studies.profiling.parts import PartTimes, annotating
from fasttrain.studies.profiling.three_runs import Stretches
from fasttrain.whole_files import half_made, told_free

_STEPS_ON_GPU, _TRACED_ON_GPU = 20, 5
_MOST_STEPS_ON_CPU, _SECONDS_ON_CPU = 3, 3.0
_BATCHES_MADE = 6
_MOST_MADE_SECONDS = 4.0
_CASES_READ = 2


@dataclass(frozen=True)
class Made:
    """Making the batches of a step in one process, in seconds by the clock and of a CPU, and its parts."""

    seconds: float
    cpu_seconds: float
    parts: Mapping[str, float]


def stepped_by_kind(runs: Stretches, one: float) -> Breakdown:
    """Where the device's time goes in steps over one batch, as the run takes them; one: seconds of one."""
    on_gpu = runs.device.type == "cuda"
    return breakdown(lambda: runs.same(1), _STEPS_ON_GPU if on_gpu else _few(one), on_gpu)


def _few(one: float) -> int:
    return min(max(int(_SECONDS_ON_CPU / one), 1), _MOST_STEPS_ON_CPU)


@dataclass(frozen=True)
class Apart:
    """Seconds a step by part, of the host and on the GPU, and of the whole of these steps."""

    host: Mapping[str, float]
    gpu: Mapping[str, float]
    seconds: float


def stepped_apart(runs: Stretches, one: float) -> Apart:
    """Real steps by part, launched kernel by kernel where a run would replay them as one graph; on a CPU the fastest step, which
    others took least from.
    """
    on_gpu = runs.device.type == "cuda"
    found: list[Apart] = []
    with runs.trainer.step.without_graph():
        runs.settle("real")
        runs.real(2 if on_gpu else 1)
        for _ in range(1 if on_gpu else _few(one)):
            found.append(_apart(runs, _STEPS_ON_GPU if on_gpu else 1, on_gpu))
    return min(found, key=lambda apart: apart.seconds)


def _apart(runs: Stretches, steps: int, on_gpu: bool) -> Apart:
    times, waits = PartTimes(on_gpu), list[float]()
    with listening(times):
        seconds = runs.seconds(lambda count: waits.append(runs.real(count)), steps)
        gpu = times.gpu()
    # Batches that the trainer's own thread makes were waited for as well
    inside = sum(times.host.get(part, 0.0) for part in ("read", "decode", "preprocess", "cut", "augment"))
    host = {**times.host, "waiting": max(waits[0] - inside, 0.0)}
    shares = [{part: spent / steps for part, spent in table.items()} for table in (host, gpu)]
    return Apart(shares[0], shares[1], seconds / steps)


def traced(runs: Stretches, path: Path) -> Path:
    """Writes the Chrome trace of some real steps, their parts named in it. Raises StorageError where it cannot be written."""
    on_gpu = runs.device.type == "cuda"
    # A folder, since the profiler leaves a file of a further name where the disk is full
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with half_made(part), runs.trainer.step.without_graph(), listening(annotating(on_gpu)):
        steps, whole = _TRACED_ON_GPU if on_gpu else 1, part / path.name
        try:
            part.mkdir(parents=True)
            breakdown(lambda: runs.real(1), steps, on_gpu, trace=whole, ranges=True)
            if not _ends_as_json(whole):
                raise OSError(None, "the disk took only a part of it")
            os.replace(whole, path)
        except OSError as error:
            told = f"{error.strerror or error}{told_free(path.parent)}"
            raise StorageError(f"{path} cannot be written: {told}; choose another folder with --out") from error
    return path


def _ends_as_json(path: Path) -> bool:
    """The profiler raises nothing where the disk is full."""
    if not path.exists():
        return False
    with path.open("rb") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - 64, 0))
        return stream.read().rstrip().endswith(b"}")


def made_alone(source: BatchSource, accumulate: int) -> Made | None:
    """Batches made in this process, with one thread as a worker has it; None where the device makes them."""
    if not isinstance(source, LoaderSource):
        return None
    maker, on_cpu, times, threads = source.maker, source.device.type == "cpu", PartTimes(False), torch.get_num_threads()
    seconds, cpu, parts = list[float](), list[float](), dict[str, float]()
    if source.loading.workers:
        torch.set_num_threads(1)
    try:
        with listening(times):
            for number in range(_BATCHES_MADE):
                if sum(seconds) > _MOST_MADE_SECONDS and number > 2:
                    break
                times.host.clear()
                began, used = time.perf_counter(), time.process_time()
                raw = maker.make(number * maker.batch_size)
                if on_cpu:
                    maker.augment(raw)
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                if seconds[-1] == min(seconds):
                    parts = dict(times.host)
    finally:
        torch.set_num_threads(threads)
    least = seconds.index(min(seconds))
    scaled = {part: spent * accumulate for part, spent in parts.items()}
    return Made(seconds[least] * accumulate, cpu[least] * accumulate, scaled)


def read_alone(recipe: Recipe, split: Split) -> dict[str, float]:
    """Seconds a case of reading, decoding and preprocessing it, of a few cases."""
    cases, times = split.train[:_CASES_READ], PartTimes(False)
    preprocess = Preprocess(recipe)
    with listening(times):
        for case in cases:
            preprocess(case)
    return {part: spent / len(cases) for part, spent in times.host.items()} if cases else {}


def validated(
    assembly: Assembly, plan: Plan, cases: Sequence[Case], stop: StopRequest, notes: list[str]
) -> float | None:
    """Seconds of a validation of all `cases`, by that of those which were opened; None where there are none."""
    validator = assembly.validator
    if not validator.cases:
        return None
    prepare_validation(validator, plan.step_bytes, plan.cuda_graphs, notes.append)
    nothing: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    # The first one chooses kernels and reads the labels
    seconds = [
        validator.run(stop, nothing).seconds for _ in range(2 if validator.predictor.device.type == "cuda" else 1)
    ]
    recipe = validator.recipe
    measured = sum(estimate_bytes([case], recipe) for case in validator.cases)
    return min(seconds) * sum(estimate_bytes([case], recipe) for case in cases) / max(measured, 1)
