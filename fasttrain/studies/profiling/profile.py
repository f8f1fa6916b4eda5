"""Owns a profile from first to last: a run prepared and built as `train` does it, measured in parts, and what follows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fasttrain.data.caches import estimate_bytes
from fasttrain.data.splits import Split
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.failures import explaining
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.preparing import Prepared, prepare
from fasttrain.engine.stop import StopRequest
from fasttrain.machine.hardware import Hardware
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.recipe import Recipe
from fasttrain.samples import Case
from fasttrain.studies.ceilings import ceilings_of
from fasttrain.studies.few_cases import few_cases, plan_for_few
from fasttrain.studies.profiling.cards import Projection
from fasttrain.studies.profiling.elsewhere import projected
from fasttrain.studies.profiling.kernels import Breakdown
from fasttrain.studies.profiling.seen import (
    Apart,
    Made,
    made_alone,
    read_alone,
    stepped_apart,
    stepped_by_kind,
    traced,
    validated,
)
from fasttrain.studies.profiling.step_changes import step_changes
from fasttrain.studies.profiling.three_runs import OneStream, Stretches, ThreeRuns, three_runs
from fasttrain.studies.profiling.verdict import (
    Change,
    Evidence,
    Verdict,
    best_two,
    data_changes,
    judge,
    most_to_gain,
    validation_changes,
)
from fasttrain.telemetry.events import Event, Progress

_VALIDATED_ON_GPU, _VALIDATED_ON_CPU = 4, 1
_READ_EACH_TIME = ("none", "disk", "lmdb")


@dataclass(frozen=True)
class Parts:
    """Seconds a step by part: as steps were taken apart, and of making a step's batches in one process (None where the device
    makes them). once: seconds of a case as it is read when the run starts.
    """

    apart: Apart
    made: Made | None
    once: Mapping[str, float]
    graph: bool


@dataclass
class Profile:
    """All that was found; see `record`."""

    recipe: str
    device: str
    plan: Plan
    patches: int
    epochs: int
    runs: ThreeRuns
    parts: Parts
    kinds: Breakdown
    validation_seconds: float | None
    validation_cases: int
    ceilings: Mapping[str, float]
    evidence: Evidence
    verdict: Verdict
    changes: list[Change]
    projections: list[Projection]
    trace: Path
    at_best: bool
    notes: list[str] = field(default_factory=list)

    @property
    def patches_per_second(self) -> float:
        """With real data."""
        return self.patches / self.runs.real.seconds

    def record(self) -> dict[str, Any]:
        """For JSON."""
        runs, plan = self.runs, self.plan
        shown = ("amp", "channels_last", "fused_layers", "cuda_graphs", "compile", "cache", "workers", "worker_kind")
        paces = {"real_data": runs.real, "one_batch": runs.same, "loader_alone": runs.loader}
        return {
            "recipe": self.recipe,
            "device": self.device,
            "torch": torch.__version__,
            "plan": {key: getattr(plan, key) for key in shown},
            "patches_per_step": self.patches,
            "patches_per_second": self.patches_per_second,
            "three_runs": {
                name: {"seconds": pace.seconds, "rounds": list(pace.rounds), "spread": pace.spread}
                for name, pace in paces.items()
            },
            "waits": runs.waits,
            "parts": {
                "graph": self.parts.graph,
                "step_seconds": self.parts.apart.seconds,
                "host_seconds": dict(self.parts.apart.host),
                "gpu_seconds": dict(self.parts.apart.gpu),
                "making_batches": None if self.parts.made is None else asdict(self.parts.made),
                "reading_a_case": dict(self.parts.once),
            },
            "kinds_ms": {**self.kinds.kinds, "idle": self.kinds.idle},
            "validation": {"seconds": self.validation_seconds, "cases": self.validation_cases},
            "ceilings": dict(self.ceilings),
            "epoch_seconds": self.evidence.epoch,
            "verdict": {"bound": self.verdict.bound, "evidence": list(self.verdict.evidence)},
            "changes": [asdict(one) for one in self.changes],
            "most_to_gain": most_to_gain(self.evidence),
            "other_cards": {
                "estimate": True,
                "at_best": self.at_best,
                "cards": [asdict(one) for one in self.projections],
            },
            "trace": str(self.trace),
            "notes": self.notes,
        }


def profile(
    recipe: Recipe,
    data: Path | None,
    device: str,
    folder: Path,
    emit: Callable[[Event], None],
    stop: StopRequest,
    prices: Mapping[str, float] | None = None,
) -> Profile:
    """Measures some steps of the run that `recipe` would be. `folder` takes the Chrome trace.

    Raises what `prepare` and `build` raise, and Stopped between two parts of the work.
    """
    few = lambda split, cache="auto": few_cases(recipe, split, cache, _validated_cases(split, recipe, device))  # noqa: E731
    prepared = prepare(recipe, data, device, emit, stop=stop, opened=few)
    whole, split = prepared.plan, few(prepared.split, prepared.plan.cache)
    plan = plan_for_few(whole, split, recipe)
    try:
        stop.check()
        raise_open_file_limit()
        prepare_torch(plan, prepared.hardware)
    except BaseException:
        if prepared.ahead is not None:
            prepared.ahead.close()
        raise
    progress = lambda what, done, total: emit(Progress(what, done, total))  # noqa: E731
    with explaining(recipe):
        assembly = build(
            recipe, plan, prepared.hardware, split, progress, lambda text, level: None, ahead=prepared.ahead
        )
        try:
            return _of_assembly(assembly, prepared, split, folder, emit, stop, prices or {})
        finally:
            assembly.close()


def _validated_cases(split: Split, recipe: Recipe, device: str) -> tuple[Case, ...]:
    """Those of middling size: the time of all is reckoned from theirs."""
    ordered = sorted(split.validation, key=lambda case: estimate_bytes([case], recipe))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    count = _VALIDATED_ON_GPU if on_gpu else _VALIDATED_ON_CPU
    first = max((len(ordered) - count) // 2, 0)
    return tuple(ordered[first : first + count])


def _of_assembly(
    assembly: Assembly,
    prepared: Prepared,
    split: Split,
    folder: Path,
    emit: Callable[[Event], None],
    stop: StopRequest,
    prices: Mapping[str, float],
) -> Profile:
    recipe, plan, hardware, trainer = prepared.recipe, prepared.plan, prepared.hardware, assembly.trainer
    stream = OneStream(trainer.source)
    trainer.source = stream  # type: ignore[assignment]
    runs = Stretches(trainer, stream, hardware.torch_device, plan.workers, plan.prefetch_factor)

    def told(done: int, total: int) -> None:
        emit(Progress("three runs in turns", done, total))
        stop.check()

    found = three_runs(runs, told)
    emit(Progress("parts of a step", 0, 4))
    # With the graph, where there is one, before a step is taken without it
    kinds = stepped_by_kind(runs, found.same.seconds)
    graph = trainer.step.captured
    apart = stepped_apart(runs, found.real.seconds)
    emit(Progress("parts of a step", 1, 4))
    trace = traced(runs, folder / "trace.json")
    stop.check()
    made = made_alone(stream.source, trainer.step.accumulate)
    once = read_alone(recipe, split)
    emit(Progress("parts of a step", 2, 4))
    notes = [trainer.step.warning] if trainer.step.warning else []
    seconds = validated(assembly, plan, prepared.split.validation, stop, notes)
    emit(Progress("parts of a step", 3, 4))
    stop.check()
    ceilings = ceilings_of(recipe, plan.amp, hardware.torch_device)
    evidence = _evidence(recipe, plan, hardware, found, kinds, made, seconds)
    changes = [
        *data_changes(evidence, _from_memory(plan, made)),
        *validation_changes(evidence, recipe.validation.every),
    ]
    del runs
    gc.collect()
    emit(Progress("settings of a step", 0, 1))
    changes += step_changes(recipe, plan, hardware, evidence)
    projections, at_best = projected(prepared, evidence, kinds, ceilings, prices)
    return Profile(
        recipe=recipe.name,
        device=hardware.device_name,
        plan=plan,
        patches=plan.sizes.effective_batch,
        epochs=plan.sizes.epochs,
        runs=found,
        parts=Parts(apart, made, once, graph),
        kinds=kinds,
        validation_seconds=seconds,
        validation_cases=len(prepared.split.validation),
        ceilings=ceilings,
        evidence=evidence,
        verdict=judge(evidence),
        changes=best_two(changes),
        projections=projections,
        trace=trace,
        at_best=at_best,
        notes=notes,
    )


def _evidence(
    recipe: Recipe,
    plan: Plan,
    hardware: Hardware,
    found: ThreeRuns,
    kinds: Breakdown,
    made: Made | None,
    validation_seconds: float | None,
) -> Evidence:
    shares = {kind: spent / kinds.whole for kind, spent in {**kinds.kinds, "idle": kinds.idle}.items() if kinds.whole}
    evidence = Evidence(
        real=found.real.seconds,
        same=found.same.seconds,
        loader=found.loader.seconds,
        steps_per_epoch=plan.sizes.steps_per_epoch,
        validating=(validation_seconds or 0.0) / recipe.validation.every,
        kinds=shares,
        on_gpu=hardware.on_gpu,
        workers=plan.workers,
        cpus=hardware.cpus,
        step_cpu=found.step_cpu_seconds,
    )
    if made is None:
        return evidence
    return replace(evidence, made=made.seconds, made_cpu=made.cpu_seconds)


def _from_memory(plan: Plan, made: Made | None) -> float | None:
    """Seconds of making a step's batches if no volume had to be read."""
    if made is None or plan.cache not in _READ_EACH_TIME:
        return None
    return made.seconds - sum(made.parts.get(part, 0.0) for part in ("read", "decode", "preprocess"))
