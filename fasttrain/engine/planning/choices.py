"""Owns the decision of each `auto` of how a step is computed and fed on this machine, with the reason for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.engine.planning.remedies import does_not_fit
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.engine.planning.trial import Candidate, held_by_batch, measure
from fasttrain.errors import MachineError, OutOfMemoryError
from fasttrain.machine.allocator import allocator_setting
from fasttrain.machine.compiler import missing_for_compile
from fasttrain.machine.hardware import Hardware
from fasttrain.networks.fused import FUSED_KINDS
from fasttrain.recipe import Recipe
from fasttrain.recipe.training_spec import MuonSpec, NovogradSpec
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.wording import counted

_NOISE = 1.1
_SET = "set in the recipe"
_COMPILE_PAYS_SECONDS = 300.0
"""Compiling takes 20 to 40 s when nothing is cached and saves a sixth or so of the training after it."""


@dataclass(frozen=True)
class StepChoice:
    """How a training step is computed. `seconds` is what one took where it was measured, `held_bytes` what it held of the GPU's
    memory (0: not measured); `reasons` by the decision's name.
    """

    candidate: Candidate
    checkpointing: bool
    seconds: float | None
    reasons: dict[str, str]
    held_bytes: int = 0


def choose_tf32(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    setting = recipe.acceleration.tf32
    able = hardware.compute_capability is not None and hardware.compute_capability >= (8, 0)
    if setting == "on" and not able:
        return False, f"asked for, but {hardware.device_name} has no TF32"
    if setting != "auto":
        return setting == "on", _SET
    return able, "float32 convolutions on tensor cores" if able else f"{hardware.device_name} has no TF32"


def _amp_choices(recipe: Recipe, hardware: Hardware) -> tuple[list[str], str]:
    setting = recipe.acceleration.amp
    capability = hardware.compute_capability
    if not hardware.on_gpu:
        if setting == "fp16":
            raise MachineError("acceleration.amp: fp16 needs a GPU; use bf16, off or auto on a CPU")
        return (["bf16", "off"], "") if setting == "auto" else ([setting], _SET)
    assert capability is not None
    if setting == "bf16" and capability < (8, 0):
        raise MachineError(f"acceleration.amp: {hardware.device_name} has no bf16; use fp16, off or auto")
    if setting != "auto":
        return [setting], _SET
    if capability >= (8, 0):
        return ["bf16"], "tensor cores, and the range of float32, so that no loss scaling is needed"
    if capability >= (7, 0):
        return ["fp16"], f"{hardware.device_name} has tensor cores for fp16 and none for bf16"
    return ["off"], f"{hardware.device_name} has no tensor cores"


def choose_step(
    recipe: Recipe,
    hardware: Hardware,
    kept: Mapping[str, Any] | None,
    emit: Callable[[Event], None] = lambda _: None,
) -> StepChoice:
    """Precision, memory layout and activation checkpointing, measured where the recipe leaves them open.

    `kept`: the plan of the run that goes on here, whose choice stands. `emit` hears of a measurement, which can take a minute
    on a CPU. Raises MachineError for a precision that the device has
    not, OutOfMemoryError where no way of computing a step fits.
    """
    amps, amp_reason = _amp_choices(recipe, hardware)
    layout = recipe.acceleration.channels_last
    layouts = [True, False] if layout == "auto" else [layout == "on"]
    layout_reason = "" if layout == "auto" else _SET
    checkpointing = recipe.acceleration.activation_checkpointing
    fused, fused_reason = _fused_layers(recipe, hardware)
    captured, captured_reason = _cuda_graphs(recipe, hardware)
    reasons = {"fused_layers": fused_reason, "cuda_graphs": captured_reason}
    if fused and layout == "auto":
        layouts, layout_reason = [True], "what fused_layers are written for"
    if kept is not None and kept["amp"] in amps and kept["channels_last"] in layouts:
        stands = "as the run began; on the same device the choice stands"
        again = kept.get("activation_checkpointing", False) if checkpointing == "auto" else checkpointing == "on"
        reasons |= {"amp": amp_reason or stands, "channels_last": layout_reason or stands}
        reasons["activation_checkpointing"] = stands if checkpointing == "auto" else _SET
        choice = Candidate(kept["amp"], kept["channels_last"], fused, captured and not again)
        same_memory = kept.get("activation_checkpointing") == again and kept.get("cuda_graphs") == choice.captured
        return StepChoice(choice, again, None, reasons, int(kept.get("step_bytes", 0)) if same_memory else 0)
    candidates = [
        Candidate(amp, channels_last, fused and channels_last, captured and checkpointing != "on")
        for amp in amps
        for channels_last in layouts
    ]
    # A GPU's step is measured even where one way is left: whether it fits, and whether compiling pays, hangs on it
    if len(candidates) == 1 and not (hardware.on_gpu and _open_on_gpu(recipe)):
        reasons |= {"amp": amp_reason, "channels_last": layout_reason}
        reasons["activation_checkpointing"] = (
            _SET if checkpointing != "auto" else "nothing is computed twice unless asked"
        )
        return StepChoice(candidates[0], checkpointing == "on", None, reasons)
    again, why = checkpointing == "on", _SET if checkpointing != "auto" else "a step fits without"
    shown = ", ".join(map(str, candidates))
    emit(Message(f"measuring a training step in {counted(len(candidates), 'way')} on {hardware.device_name}: {shown}"))
    told = lambda done, total: emit(Progress("measuring a training step", done, total))  # noqa: E731
    held: dict[Candidate, int] = {}
    seconds = measure(recipe, hardware, candidates, again, told, held)
    if not seconds and checkpointing == "auto" and hardware.on_gpu:
        again, why = True, f"a step does not fit into {hardware.gpu_gib} GiB without"
        candidates = [replace(candidate, captured=False) for candidate in candidates]
        if captured:
            reasons["cuda_graphs"] = "activation_checkpointing cannot be recorded"
        seconds = measure(recipe, hardware, candidates, again, told, held)
    if not seconds:
        few = [size for size in (1, 2) if size < recipe.training.batch_size]
        by_batch = held_by_batch(recipe, hardware, candidates[0], again, few) if hardware.on_gpu else {}
        raise OutOfMemoryError(does_not_fit(recipe, hardware, by_batch, again))
    # The first ones are the likely ones: another must be clearly faster, or noise would change the choice from run to run
    least = min(seconds.values())
    best = next(candidate for candidate, value in seconds.items() if value <= least * _NOISE)
    if captured and not again and not best.captured:
        reasons["cuda_graphs"] = "a step could not be recorded when it was measured, for want of memory or otherwise"
    measured = _told(seconds, best)
    reasons |= {
        "amp": amp_reason or measured,
        "channels_last": layout_reason or measured,
        "activation_checkpointing": why,
    }
    return StepChoice(best, again, seconds[best], reasons, held.get(best, 0))


def likely_candidate(recipe: Recipe, hardware: Hardware) -> Candidate:
    """What `choose_step` tries first. Raises MachineError for a precision that the device has not."""
    amps, _ = _amp_choices(recipe, hardware)
    fused, _ = _fused_layers(recipe, hardware)
    captured, _ = _cuda_graphs(recipe, hardware)
    return Candidate(amps[0], fused or recipe.acceleration.channels_last != "off", fused, captured)


def _fused_layers(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    """Whether the network runs in its fused, channels-last form."""
    acceleration = recipe.acceleration
    if acceleration.fused_layers == "off":
        return False, _SET
    asked = "asked for, but " if acceleration.fused_layers == "on" else ""
    lacking = missing_for_kernels(hardware)
    if lacking is not None:
        return False, f"{asked}{lacking}"
    if recipe.network.kind not in FUSED_KINDS:
        return False, f"{asked}network.kind: {recipe.network.kind} has no fused form"
    if acceleration.fused_layers == "auto" and acceleration.channels_last == "off":
        return False, "channels_last is off"
    if acceleration.fused_layers == "auto" and acceleration.compile == "on":
        return False, "compile is on"
    return True, _SET if asked else "norms, activations and small convolutions in kernels made for them"


def _cuda_graphs(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    """Whether a step is recorded and launched as a whole."""
    acceleration = recipe.acceleration
    if acceleration.cuda_graphs == "off":
        return False, _SET
    asked = "asked for, but " if acceleration.cuda_graphs == "on" else ""
    one_form = isinstance(recipe.optimizer, MuonSpec | NovogradSpec)
    hindrances = {
        "there is no GPU": not hardware.on_gpu,
        "fused_optimizer is off": acceleration.fused_optimizer == "off" and not one_form,
        "activation_checkpointing cannot be recorded": acceleration.activation_checkpointing == "on",
        "compile is on": acceleration.compile == "on",
        f"network.kind: {recipe.network.kind} may ask the host in its step": recipe.network.kind == "monai"
        and not asked,
    }
    hindrance = next((text for text, holds in hindrances.items() if holds), None)
    if hindrance is not None:
        return False, f"{asked}{hindrance}"
    return True, _SET if asked else "a step's kernels are launched at once"


def missing_for_kernels(hardware: Hardware) -> str | None:
    """What fasttrain's own kernels lack on this machine; None where they run."""
    if not hardware.on_gpu:
        return "there is no GPU"
    if hardware.compute_capability is None or hardware.compute_capability < (7, 0):
        return f"{hardware.device_name} is too old for Triton"
    return missing_for_compile()


def _open_on_gpu(recipe: Recipe) -> bool:
    return "auto" in (recipe.acceleration.activation_checkpointing, recipe.acceleration.compile)


def _told(seconds: Mapping[Candidate, float], best: Candidate) -> str:
    shown = ", ".join(f"{candidate} {value * 1000:.0f} ms" for candidate, value in _by_seconds(seconds))
    near = "" if _by_seconds(seconds)[0][0] == best else f"; {best} is no more than 10% behind and the usual choice"
    return f"measured, a training step: {shown}{near}"


def _by_seconds(seconds: Mapping[Candidate, float]) -> Sequence[tuple[Candidate, float]]:
    return sorted(seconds.items(), key=lambda pair: pair[1])


def choose_compile(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Sizes,
    seconds: float | None,
    kept: Mapping[str, Any] | None,
    fused_layers: bool = False,
) -> tuple[bool, str]:
    """Whether torch.compile is worth its start-up, by the step's measured seconds; `on` needs the tools all the same."""
    setting = recipe.acceleration.compile
    if setting == "off":
        return False, _SET
    if fused_layers and setting == "auto":
        return False, "fused_layers do its work"
    if not hardware.on_gpu:
        if setting == "on":
            return True, f"{_SET}; on a CPU it may take minutes to begin"
        return False, "on a CPU it takes minutes to begin"
    missing = missing_for_compile()
    if missing is not None:
        return False, f"{'asked for, but ' if setting == 'on' else ''}{missing}, so the network runs as it is"
    if setting == "on":
        return True, _SET
    if kept is not None and "compile" in kept:
        return bool(kept["compile"]), "as the run began; on the same device the choice stands"
    if seconds is None:
        return False, "nothing was measured; set acceleration.compile: on for a run of more than some minutes"
    training = seconds * sizes.accumulate * sizes.total_steps
    told = f"about {training:.0f} s of training steps"
    if training >= _COMPILE_PAYS_SECONDS:
        return True, f"{told} pay for some 30 s of compiling"
    return False, f"{told} would not pay for some 30 s of compiling"


def choose_fused(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    """Whether the optimiser updates all weights in one kernel."""
    setting = recipe.acceleration.fused_optimizer
    asked = "off was asked for, but " if setting == "off" else ""
    if isinstance(recipe.optimizer, NovogradSpec):
        return True, f"{asked}Novograd has one form only, which updates weight by weight"
    if isinstance(recipe.optimizer, MuonSpec):
        return True, f"{asked}Muon has one form only, which updates filters of one shape together"
    return setting != "off", _SET if setting != "auto" else "one kernel for all weights, and no wait for a check"


def choose_segments(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    """Whether the GPU's allocator may grow its blocks; what the user's environment says comes first."""
    setting, given = recipe.acceleration.expandable_segments, allocator_setting()
    if not hardware.on_gpu:
        return False, f"{'asked for, but ' if setting == 'on' else ''}there is no GPU"
    if given is not None:
        return "expandable_segments:True" in given, f"{given} in the environment"
    if setting == "on" or (setting == "auto" and sys.platform == "linux"):
        return True, _SET if setting == "on" else "memory of one shape can serve another"
    return False, _SET if setting == "off" else "Linux alone has them"


def choose_pinning(recipe: Recipe, hardware: Hardware) -> tuple[bool, str]:
    """Whether batches wait in pinned memory."""
    setting = recipe.data.pin_memory
    if not hardware.on_gpu:
        return False, f"{'asked for, but ' if setting == 'on' else ''}there is no GPU to copy to"
    return setting != "off", _SET if setting != "auto" else "a GPU copies from it without waiting"


def choose_copy_stream(recipe: Recipe, hardware: Hardware, pinned: bool) -> tuple[bool, str]:
    """Whether the next batch is copied to the GPU while a step runs."""
    setting = recipe.data.copy_stream
    if not hardware.on_gpu:
        return False, f"{'asked for, but ' if setting == 'on' else ''}there is no GPU to copy to"
    if setting == "auto":
        return pinned, "copies run beside the step" if pinned else "copies from memory that is not pinned wait anyway"
    return setting == "on", _SET
