"""Owns what happens in a trial's process: a run prepared and built as `train` does it, cut down to what a measurement needs."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fasttrain.batches import ResidentSource
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.splits import Split
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.failures import explained
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.preparing import look, prepare
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.together import steps_to_a_graph
from fasttrain.engine.validating.validation_memory import prepare_validation
from fasttrain.errors import FasttrainError, OutOfMemoryError, exit_code_of, ran_out_of_memory, wants_memory
from fasttrain.machine.allocator import allocator_setting, expand_segments
from fasttrain.machine.hardware import GIB, Hardware, survey
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.machine.place import Place
from fasttrain.machine.ranks import Ranks
from fasttrain.machine.threads import limit_threads
from fasttrain.recipe import Recipe
from fasttrain.studies.ceilings import ceilings_of
from fasttrain.studies.few_cases import few_cases, largest_case, plan_for_few
from fasttrain.studies.machine_record import machine_record
from fasttrain.studies.task import LOOK, STEPS, Task
from fasttrain.studies.timing import endless, timed
from fasttrain.studies.trial_ranks import Seat, join, leave_word_to_another, of_all
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.events import Event, Message, Progress

Emit = Callable[[Event], None]

_STEPS_BEHIND_A_GRAPH = 3


def perform(task: Task, emit: Emit, seat: Seat | None = None) -> dict[str, Any]:
    """What the trial's process writes: the fields of an `Outcome`. Whatever fails becomes one. seat: this one's of several."""
    seat = seat or Seat()
    began = time.perf_counter()
    recipe = Recipe.model_validate_json(task.recipe)
    try:
        if task.kind == LOOK:
            values = _look(recipe, task, emit)
        else:
            values = _built(recipe, task, emit, join(seat, task.device))
        found: dict[str, Any] = {"status": "done", "values": values}
    except Exception as error:
        known = explained(error, recipe, 0) or error
        faults = known.faults if isinstance(known, FasttrainError) else (_named(known),)
        memory = isinstance(known, OutOfMemoryError) or wants_memory(known) or ran_out_of_memory(known)
        leave_word_to_another(error, known, seat.place, memory)
        if not memory:
            import traceback

            traceback.print_exc()
        sys.stderr.write("\n".join(faults) + "\n")
        status = "memory" if memory else "failed"
        found = {"status": status, "faults": list(faults), "exit_code": exit_code_of(known)}
    return {**found, "seconds": time.perf_counter() - began}


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _look(recipe: Recipe, task: Task, emit: Emit) -> dict[str, Any]:
    looked = look(recipe, _path(task.data), task.device, emit, seat=Place(0, task.ranks, 0, task.ranks))
    # The machine as one process has it: its CPUs are not a rank's share of them
    hardware = looked.hardware if task.ranks == 1 else survey(task.device)
    return {"machine": machine_record(hardware), "sizes": asdict(looked.sizes), "root": str(looked.root)}


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


@dataclass(frozen=True)
class _Decided:
    """What one trial works on, the same on all ranks but for `hardware` and the first one's `ahead`."""

    hardware: Hardware
    whole: Plan
    split: Split
    ahead: MadeAhead | None


def _decided(recipe: Recipe, task: Task, emit: Emit, ranks: Ranks) -> _Decided:
    """The plan of the whole run and the few cases, which the first rank finds; the others wait for it."""

    def few(split: Split, cache: str = "auto") -> Split:
        validated = largest_case(split.validation, recipe) if task.kind != STEPS else ()
        return few_cases(recipe, split, cache, validated, task.cases)

    if ranks.place.leads:
        former, device = _former(task), task.former_device
        prepared = prepare(recipe, _path(task.data), task.device, emit, former, device, opened=few, seat=ranks.place)
        whole = prepared.plan
        split = few(prepared.split, whole.cache)
        ranks.share((whole, split))
        return _Decided(prepared.hardware, whole, split, prepared.ahead)
    whole, split = ranks.share(None)
    hardware = survey(task.device, ranks.place)
    if hardware.on_gpu and allocator_setting() is None:
        expand_segments(whole.expandable_segments)
    limit_threads(whole.threads)
    return _Decided(hardware, whole, split, None)


def _built(recipe: Recipe, task: Task, emit: Emit, ranks: Ranks) -> dict[str, Any]:
    began = time.perf_counter()
    decided = _decided(recipe, task, emit, ranks)
    planning_seconds = time.perf_counter() - began
    hardware, whole, split = decided.hardware, decided.whole, decided.split
    plan = plan_for_few(whole if task.compiled else replace(whole, compile=False), split, recipe)
    raise_open_file_limit()
    prepare_torch(plan, hardware)
    progress, ahead = _progress(emit), decided.ahead
    assembly = build(recipe, plan, hardware, split, progress, lambda text, level: None, ahead=ahead, ranks=ranks)
    try:
        ballast = _ballast(assembly, whole, hardware)
        if task.kind == STEPS:
            found = _stepped(assembly, plan, hardware, emit, began, task, ranks)
        else:
            found = _validated(assembly, plan, emit, ranks)
        del ballast
        found["free_bytes"] = int((hardware.gpu_free_gib or 0.0) * GIB)
        found["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = of_all(ranks, found)
        if task.ceilings and task.kind == STEPS and ranks.place.leads:
            found["ceilings"] = ceilings_of(recipe, plan.amp, hardware.torch_device)
    except BaseException:
        # Of several ranks the others may wait for this one in the middle of a step, and a device that waits for them never ends
        if ranks.place.alone:
            assembly.close()
        raise
    assembly.close()
    record = {key: value for key, value in whole.record().items() if key not in ("decisions", "sizes")}
    return {
        **found,
        "plan": record,
        "reasons": {one.name: one.reason for one in whole.decisions},
        "device_name": hardware.device_name,
        "would_compile": whole.compile,
        "planning_seconds": planning_seconds,
        "steps_per_epoch": whole.sizes.steps_per_epoch,
    }


def _former(task: Task) -> dict[str, Any] | None:
    """The earlier plan in the form that a resume knows; no case was left out since."""
    if task.former is None:
        return None
    return {**task.former, "cases": {"training": [], "validation": []}, "skipped_cases": {}}


def _progress(emit: Emit) -> Callable[[str, int, int], None]:
    return lambda what, done, total: emit(Progress(what, done, total))


def _ballast(assembly: Assembly, whole: Plan, hardware: Hardware) -> torch.Tensor | None:
    """The memory that the cases take which a trial leaves out."""
    source = assembly.trainer.source
    if not hardware.on_gpu or not isinstance(source, ResidentSource) or source.resident is None:
        return None
    left = whole.resident_bytes - source.resident.used_bytes
    return torch.empty(left, dtype=torch.uint8, device=hardware.torch_device) if left > 0 else None


def _stepped(
    assembly: Assembly, plan: Plan, hardware: Hardware, emit: Emit, began: float, task: Task, ranks: Ranks
) -> dict[str, Any]:
    device, trainer = hardware.torch_device, assembly.trainer
    retries, reports = _retries(device), endless(trainer)
    next(reports)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_seconds = time.perf_counter() - began
    peaks: dict[str, int] = {}

    def warmed() -> None:
        # What cuDNN tried and did not choose is no part of what a step needs
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peaks["first"] = torch.cuda.max_memory_reserved(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    monitor = DeviceMonitor(hardware.gpu_uuid)
    try:
        told = lambda done, total: emit(Progress(f"measuring batch {plan.sizes.batch_size}", done, total))  # noqa: E731
        monitor.read()
        rates = timed(reports, device, warmed, told, plan.workers * plan.prefetch_factor, task.most_seconds, ranks)
        reading = monitor.read()
    finally:
        monitor.close()
    found: dict[str, Any] = {
        "repeats": list(rates.repeats),
        "start_seconds": start_seconds,
        "rate": rates.median if hardware.on_gpu else rates.best,
        "median": rates.median,
        "spread": rates.spread,
        "wait_share": rates.wait_share,
        "utilisation": reading.utilisation,
        "warnings": [trainer.step.warning] if trainer.step.warning else [],
    }
    if hardware.on_gpu:
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        found["first_reserved_bytes"] = peaks["first"]
        found["retries"] = _retries(device) - retries
    return found


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def _validated(assembly: Assembly, plan: Plan, emit: Emit, ranks: Ranks) -> dict[str, Any]:
    """One validation beside what a training holds, its optimiser's state and recorded graph among it."""
    validator, warnings = assembly.validator, list[str]()
    device = validator.predictor.device
    reports = endless(assembly.trainer)
    to_a_graph = steps_to_a_graph(ranks.place.ranks) + _STEPS_BEHIND_A_GRAPH
    for _ in range(to_a_graph if device.type == "cuda" else 1):
        next(reports)
    if not validator.cases:
        return {"case": None}
    decision = prepare_validation(validator, plan.step_bytes, plan.cuda_graphs, warnings.append)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    told = lambda done, total: emit(Progress("validating the largest case", done, total))  # noqa: E731
    seconds = []
    # The first one chooses kernels and reads the label; what an epoch pays is the second
    for _ in range(2 if device.type == "cuda" else 1):
        seconds.append(validator.run(StopRequest(), told).seconds)
    found: dict[str, Any] = {
        "case": validator.cases[0].name,
        "validation_seconds": min(seconds),
        "summed_on": validator.predictor.stitch_device.type,
        "stitching": None if decision is None else decision.reason,
        "warnings": warnings,
    }
    if device.type == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def emitting(descriptor: int) -> Emit:
    """Sends progress and messages as lines of JSON, each whole in one write, to a reader who may have gone."""
    import json

    def emit(event: Event) -> None:
        if not isinstance(event, Progress | Message):
            return
        kind = "progress" if isinstance(event, Progress) else "message"
        with contextlib.suppress(OSError):
            os.write(descriptor, json.dumps({kind: asdict(event)}).encode() + b"\n")

    return emit
