"""Owns the settings of a step that a profile tries: each is measured, where the machine can and the recipe does not do it yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from fasttrain.engine.planning.choices import missing_for_kernels
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.planning.trial import Candidate, measure
from fasttrain.errors import ran_out_of_memory
from fasttrain.machine.hardware import Hardware
from fasttrain.networks.fused import FUSED_KINDS
from fasttrain.recipe import Recipe
from fasttrain.studies.profiling.verdict import Change, Evidence, changed

_BF16 = (8, 0)


def step_changes(recipe: Recipe, plan: Plan, hardware: Hardware, found: Evidence) -> list[Change]:
    """What each would gain, by the ratio of measured steps; what the plan chose by measuring is not tried again."""
    own = Candidate(plan.amp, plan.channels_last, plan.fused_layers, plan.cuda_graphs)
    others = _others(recipe, plan, hardware, own)
    again = plan.activation_checkpointing
    if not others and not again:
        return []
    try:
        seconds = measure(recipe, hardware, [own, *others], again)
        # Where both hold the same network, rounds in turns would need both in memory
        without = measure(recipe, hardware, [own])[own] if again else None
    except (KeyError, RuntimeError, MemoryError) as error:
        if isinstance(error, KeyError) or ran_out_of_memory(error):
            return []
        raise
    finally:
        if hardware.on_gpu:
            torch.cuda.empty_cache()
    base = seconds.get(own)
    if base is None:
        return []
    changes = [
        _change(found, others[candidate], base, taken) for candidate, taken in seconds.items() if candidate in others
    ]
    if without is not None:
        changes.append(_change(found, "acceleration.activation_checkpointing: off", base, without))
    return changes


def _change(found: Evidence, setting: str, before: float, after: float) -> Change:
    how = f"measured: a step over made patches takes {after * 1000:.3g} ms and not {before * 1000:.3g} ms"
    return changed(found, setting, found.with_step(after / before), how)


def _others(recipe: Recipe, plan: Plan, hardware: Hardware, own: Candidate) -> dict[Candidate, str]:
    asked = recipe.acceleration
    found: dict[Candidate, str] = {}
    if plan.amp == "off" and asked.amp != "auto":
        able = not hardware.on_gpu or (hardware.compute_capability or (0, 0)) >= _BF16
        amp = "bf16" if able else "fp16"
        found[replace(own, amp=amp)] = f"acceleration.amp: {amp}"
    if asked.channels_last != "auto" and not plan.fused_layers:
        word = "off" if plan.channels_last else "on"
        found[replace(own, channels_last=not plan.channels_last)] = f"acceleration.channels_last: {word}"
    kernels = recipe.network.kind in FUSED_KINDS and missing_for_kernels(hardware) is None
    if kernels and not plan.fused_layers and not plan.compile:
        found[replace(own, fused=True, channels_last=True)] = "acceleration.fused_layers: on"
    if hardware.on_gpu and not plan.cuda_graphs and not plan.compile and not plan.activation_checkpointing:
        found[replace(own, captured=True)] = "acceleration.cuda_graphs: on"
    return found
