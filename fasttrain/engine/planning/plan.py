"""Owns the plan of a run: its sizes, and each `auto` of the recipe decided for this machine, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fasttrain.engine.planning import choices
from fasttrain.engine.planning.decisions import Decision
from fasttrain.engine.planning.gpu_memory import cards_together, on_gpus_bytes, resident_bytes
from fasttrain.engine.planning.loss_plan import choose_loss_kernels
from fasttrain.engine.planning.memory_plan import choose_cache, choose_fill_threads, memory_need
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.engine.planning.worker_plan import choose_workers
from fasttrain.machine.allocator import allocator_setting, expand_segments
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.machine.threads import thread_count
from fasttrain.recipe import Recipe
from fasttrain.telemetry.events import Event


@dataclass(frozen=True)
class Plan:
    """The decided values, which the assembler follows, and the decisions as a person reads them."""

    sizes: Sizes
    amp: str
    channels_last: bool
    tf32: bool
    threads: int
    fused_layers: bool
    cuda_graphs: bool
    compile: bool
    activation_checkpointing: bool
    fused_optimizer: bool
    expandable_segments: bool
    cache: str
    fill_threads: int
    workers: int
    prefetch_factor: int
    worker_kind: str
    pin_memory: bool
    copy_stream: bool
    decisions: tuple[Decision, ...]
    step_bytes: int = 0
    """What a measured step held of the GPU's memory; 0: none was measured."""
    resident_bytes: int = 0
    """Of a GPU's memory that the volumes of training cases are to take."""
    cards: int = 1
    """GPUs of a machine that hold the volumes in parts; 1: each has its own."""

    def record(self) -> dict[str, Any]:
        """Plain values for `plan.json`."""
        return asdict(self)


def make_plan(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Sizes,
    former: Mapping[str, Any] | None = None,
    former_device: str | None = None,
    emit: Callable[[Event], None] = lambda _: None,
) -> Plan:
    """Decides every `auto`. `former` is the plan of the run that is resumed: on the same kind of device its precision and
    layout stand, since measuring again might choose others and the losses would no longer be those of an unbroken run.
    `emit` hears of what takes time.
    """
    decisions: list[Decision] = []

    def decide(name: str, value: object, reason: str) -> None:
        shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        decisions.append(Decision(name, str(shown), reason))

    decide("device", hardware.device, hardware.device_name)
    threads, why = thread_count(recipe.acceleration.threads, hardware.on_gpu, hardware.local_ranks)
    decide("threads", threads, why)
    kept = former if former is not None and former_device == hardware.device_name else None
    segments, why = choices.choose_segments(recipe, hardware)
    decide("expandable_segments", segments, why)
    if hardware.on_gpu and allocator_setting() is None:
        # Before anything is measured: the allocator reads it when the GPU is first used
        expand_segments(segments)
    tf32, why = choices.choose_tf32(recipe, hardware)
    decide("tf32", tf32, why)
    step = choices.choose_step(recipe, hardware, kept, emit)
    decide("amp", step.candidate.amp, step.reasons["amp"])
    decide("channels_last", step.candidate.channels_last, step.reasons["channels_last"])
    decide("activation_checkpointing", step.checkpointing, step.reasons["activation_checkpointing"])
    decide("fused_layers", step.candidate.fused, step.reasons["fused_layers"])
    compiled, why = choices.choose_compile(recipe, hardware, sizes, step.seconds, kept, step.candidate.fused)
    captured = step.candidate.captured and not compiled
    decide(
        "cuda_graphs", captured, step.reasons["cuda_graphs"] if captured == step.candidate.captured else "compile is on"
    )
    decide("compile", compiled, why)
    decide("loss_kernels", *choose_loss_kernels(recipe, step.candidate.fused))
    fused, why = choices.choose_fused(recipe, hardware)
    decide("fused_optimizer", fused, why)
    cache, why = choose_cache(recipe, hardware, sizes, former, step_bytes=step.held_bytes)
    decide("cache", cache, why)
    cards, resident, on_gpus = 1, 0, 0
    if cache == "gpu":
        resident = resident_bytes(recipe, hardware, sizes, step.held_bytes)
        on_gpus = on_gpus_bytes(recipe, hardware, sizes, step.held_bytes)
        cards, why = cards_together(recipe, hardware, sizes, step.held_bytes)
        if hardware.local_ranks > 1:
            decide("gpu_cache", f"shared by {cards}" if cards > 1 else "a copy each", why)
    filling, why = choose_fill_threads(recipe, hardware, sizes, cache, resident=on_gpus)
    decide("fill_threads", filling, why)
    need = memory_need(recipe, hardware, sizes, cache, resident=on_gpus)
    # What the volumes leave is for all ranks of the machine
    spare = (hardware.memory_free_gib * GIB - need.volumes - need.validation) / hardware.local_ranks
    feeding = choose_workers(recipe, hardware, cache, spare, sizes.build_bytes)
    decide("workers", feeding.workers, feeding.reasons["workers"])
    decide("prefetch_factor", feeding.prefetch_factor, feeding.reasons["prefetch_factor"])
    decide("worker_kind", feeding.kind, feeding.reasons["worker_kind"])
    pinned, why = choices.choose_pinning(recipe, hardware)
    decide("pin_memory", pinned, why)
    streamed, why = choices.choose_copy_stream(recipe, hardware, pinned)
    decide("copy_stream", streamed, why)
    return Plan(
        sizes=sizes,
        amp=step.candidate.amp,
        channels_last=step.candidate.channels_last,
        tf32=tf32,
        threads=threads,
        fused_layers=step.candidate.fused,
        cuda_graphs=captured,
        compile=compiled,
        activation_checkpointing=step.checkpointing,
        fused_optimizer=fused,
        expandable_segments=segments,
        cache=cache,
        fill_threads=filling,
        workers=feeding.workers,
        prefetch_factor=feeding.prefetch_factor,
        worker_kind=feeding.kind,
        pin_memory=pinned,
        copy_stream=streamed,
        decisions=tuple(decisions),
        step_bytes=step.held_bytes,
        resident_bytes=resident,
        cards=cards,
    )
