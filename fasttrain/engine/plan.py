"""Owns the plan of a run: its sizes, and each `auto` of the recipe decided for this machine, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fasttrain.engine.decisions import Decision
from fasttrain.engine.trial import Candidate, measure
from fasttrain.errors import MachineError, OutOfMemoryError
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.machine.threads import thread_count
from fasttrain.recipe import Recipe

_MEMORY_SHARE = 0.6
_NOISE = 1.1
_MOST_AUTO_WORKERS = 8


@dataclass(frozen=True)
class Sizes:
    """What a run will do, in numbers. `batch_size` is patches per forward pass, `effective_batch` per optimiser step."""

    training_cases: int
    validation_cases: int
    test_cases: int
    samples_per_case: int
    batch_size: int
    accumulate: int
    effective_batch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    cache_bytes: int


@dataclass(frozen=True)
class Plan:
    """The decided values, which the assembler follows, and the decisions as a person reads them."""

    sizes: Sizes
    amp: str
    channels_last: bool
    tf32: bool
    threads: int
    cache: str
    workers: int
    pin_memory: bool
    decisions: tuple[Decision, ...]

    def record(self) -> dict[str, Any]:
        """Plain values for `plan.json`."""
        return asdict(self)


def sizes_of(recipe: Recipe, cases: tuple[int, int, int], cache_bytes: int) -> Sizes:
    """`cases`: training, validation and test cases. An epoch is a pass over the training cases in whole steps (the last one
    reaches into the next pass), or `training.iterations_per_epoch` steps.
    """
    training = recipe.training
    effective = training.batch_size * training.accumulate
    pass_length = cases[0] * recipe.data.samples_per_case
    steps = training.iterations_per_epoch or math.ceil(pass_length / effective)
    return Sizes(
        training_cases=cases[0],
        validation_cases=cases[1],
        test_cases=cases[2],
        samples_per_case=recipe.data.samples_per_case,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
        effective_batch=effective,
        steps_per_epoch=steps,
        epochs=training.epochs,
        total_steps=steps * training.epochs,
        cache_bytes=cache_bytes,
    )


def make_plan(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Sizes,
    former: Mapping[str, Any] | None = None,
    former_device: str | None = None,
) -> Plan:
    """Decides every `auto`. `former` is the plan of the run that is resumed: on the same kind of device its precision and
    layout stand, since measuring again might choose others and the losses would no longer be those of an unbroken run.
    """
    decisions: list[Decision] = []

    def decide(name: str, value: object, reason: str) -> None:
        shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        decisions.append(Decision(name, str(shown), reason))

    decide("device", hardware.device, hardware.device_name)
    threads, why = thread_count(recipe.acceleration.threads, hardware.on_gpu)
    decide("threads", threads, why)
    kept = former if former is not None and former_device == hardware.device_name else None
    tf32, why = _tf32(recipe, hardware)
    decide("tf32", tf32, why)
    candidate, reasons = choose_precision(recipe, hardware, kept)
    decide("amp", candidate.amp, reasons[0])
    decide("channels_last", candidate.channels_last, reasons[1])
    cache, why = _cache(recipe, hardware, sizes)
    decide("cache", cache, why)
    workers, why = _workers(recipe, hardware, cache)
    decide("workers", workers, why)
    return Plan(
        sizes=sizes,
        amp=candidate.amp,
        channels_last=candidate.channels_last,
        tf32=tf32,
        threads=threads,
        cache=cache,
        workers=workers,
        pin_memory=hardware.on_gpu,
        decisions=tuple(decisions),
    )


def _tf32(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    setting = recipe.acceleration.tf32
    able = hardware.compute_capability is not None and hardware.compute_capability >= (8, 0)
    if setting == "on" and not able:
        return False, f"asked for, but {hardware.device_name} has no TF32"
    if setting != "auto":
        return setting == "on", "set in the recipe"
    return able, "float32 convolutions on tensor cores" if able else f"{hardware.device_name} has no TF32"


def _amp_choices(recipe: Recipe, hardware: Hardware) -> tuple[list[str], str]:
    setting = recipe.acceleration.amp
    capability = hardware.compute_capability
    if not hardware.on_gpu:
        if setting == "fp16":
            raise MachineError("acceleration.amp: fp16 needs a GPU; use bf16, off or auto on a CPU")
        return (["bf16", "off"], "") if setting == "auto" else ([setting], "set in the recipe")
    assert capability is not None
    if setting == "bf16" and capability < (8, 0):
        raise MachineError(f"acceleration.amp: {hardware.device_name} has no bf16; use fp16, off or auto")
    if setting != "auto":
        return [setting], "set in the recipe"
    if capability >= (8, 0):
        return ["bf16"], "tensor cores, and the range of float32, so that no loss scaling is needed"
    if capability >= (7, 0):
        return ["fp16"], f"{hardware.device_name} has tensor cores for fp16 and none for bf16"
    return ["off"], f"{hardware.device_name} has no tensor cores"


def choose_precision(
    recipe: Recipe, hardware: Hardware, kept: Mapping[str, Any] | None
) -> tuple[Candidate, tuple[str, str]]:
    amps, amp_reason = _amp_choices(recipe, hardware)
    layout = recipe.acceleration.channels_last
    layouts = [True, False] if layout == "auto" else [layout == "on"]
    layout_reason = "" if layout == "auto" else "set in the recipe"
    if kept is not None and kept["amp"] in amps and kept["channels_last"] in layouts:
        reason = "as the run began; on the same device the choice stands"
        return Candidate(kept["amp"], kept["channels_last"]), (amp_reason or reason, layout_reason or reason)
    candidates = [Candidate(amp, channels_last) for amp in amps for channels_last in layouts]
    if len(candidates) == 1:
        return candidates[0], (amp_reason, layout_reason)
    seconds = measure(recipe, hardware, candidates)
    # The first ones are the likely ones: another must be clearly faster, or noise would change the choice from run to run
    least = min(seconds.values())
    best = next(candidate for candidate in candidates if seconds[candidate] <= least * _NOISE)
    return best, (amp_reason or _told(seconds, best), layout_reason or _told(seconds, best))


def _told(seconds: Mapping[Candidate, float], best: Candidate) -> str:
    shown = ", ".join(f"{candidate} {value * 1000:.0f} ms" for candidate, value in _by_seconds(seconds))
    near = "" if _by_seconds(seconds)[0][0] == best else f"; {best} is no more than 10% behind and the usual choice"
    return f"measured, a training step: {shown}{near}"


def _by_seconds(seconds: Mapping[Candidate, float]) -> Sequence[tuple[Candidate, float]]:
    return sorted(seconds.items(), key=lambda pair: pair[1])


def _cache(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> tuple[str, str]:
    need, free = sizes.cache_bytes / GIB, hardware.memory_free_gib
    fits = need <= free * _MEMORY_SHARE
    about = f"about {need:.1f} GiB" if need >= 1 else f"about {need * 1024:.0f} MiB"
    setting = recipe.data.cache.kind
    if setting == "memory" and need > free:
        raise OutOfMemoryError(
            f"data.cache.kind: memory needs {about} and {free:.1f} GiB are free; use none, or a machine with more"
        )
    if setting != "auto":
        return setting, f"set in the recipe; {about}"
    if fits:
        return "memory", f"{about} of {free:.1f} GiB free"
    return "none", f"{about} would not leave enough of {free:.1f} GiB free"


def _workers(recipe: Recipe, hardware: Hardware, cache: str) -> tuple[int, str]:
    setting = recipe.data.workers
    if isinstance(setting, int):
        return setting, "set in the recipe"
    if not hardware.on_gpu and cache == "memory":
        return 0, "the cases are in memory and the CPU's cores train"
    workers = max(1, min(hardware.cpus - 1, _MOST_AUTO_WORKERS))
    return workers, f"{hardware.cpus} CPUs may be used"
