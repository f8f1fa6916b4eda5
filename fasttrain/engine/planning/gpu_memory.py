"""Owns the plan of the GPU's memory: what a step and a validation need of it, and so how many volumes may lie there."""

from __future__ import annotations

import math

from fasttrain.batches import slot_bytes
from fasttrain.batches.device_room import voxel_bytes
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.recipe import Recipe
from fasttrain.wording import counted, size_in_memory, sizes_apart

UNMEASURED_SHARE = 0.4
"""Of the free memory that volumes may fill where no step was measured."""
MOST_SHARE = 0.8
LEAST_SHARE = 0.1
"""Of a set: where fewer of its volumes would lie on the GPU, `auto` keeps all of them on the host."""
STEP_MARGIN = 1.25
"""cuDNN tries algorithms with larger workspaces than the measured step had, and memory comes apart in use."""
OWN_BYTES = GIB
"""Of CUDA itself, its kernels and recorded graphs."""
_MOST_VALIDATION_SHARE = 0.25
"""Of the GPU; a larger volume is stitched elsewhere."""


def volume_room(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> int:
    """Bytes of the GPU's free memory that volumes may take; `step_bytes`: what a measured step held, 0: none was measured."""
    if hardware.gpu_gib is None:
        return 0
    free = _free(hardware)
    if step_bytes:
        left = free - int(step_bytes * STEP_MARGIN) - stitching_bytes(recipe, hardware, sizes) - OWN_BYTES
        room = min(left, int(free * MOST_SHARE))
    else:
        room = int(free * UNMEASURED_SHARE)
    return max(room - slot_bytes(recipe), 0)


def cards_together(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> tuple[int, str]:
    """How many of the machine's GPUs hold one set of volumes in parts, 1 where each has its own, and why."""
    cards, setting = hardware.local_ranks, recipe.data.cache.shard
    room, whole = volume_room(recipe, hardware, sizes, step_bytes), sizes.training_bytes
    if cards == 1:
        return 1, "one rank"
    asked = "asked for, but " if setting == "on" else ""
    if setting == "off":
        return 1, "set in the recipe"
    if setting == "auto" and whole <= room:
        return 1, f"each of {cards} GPUs has room for all {size_in_memory(whole)}, and its own memory is nearest"
    if not hardware.cards_reach:
        return 1, f"{asked}the {cards} GPUs cannot read each other's memory"
    if setting == "on":
        return cards, f"set in the recipe; {cards} GPUs read each other's memory"
    needs, has = sizes_apart(whole, room)
    return cards, f"one GPU has room for {has} of {needs}; {cards} hold a part each and read each other's memory"


def resident_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> int:
    """Bytes of the training cases' volumes that are to lie on a GPU: all of them where there is room, of several GPUs that hold
    them together a part, with room for one case more.
    """
    cards = cards_together(recipe, hardware, sizes, step_bytes)[0]
    wanted = sizes.training_bytes if cards == 1 else sizes.training_bytes // cards + max(sizes.build_bytes, 1)
    return min(volume_room(recipe, hardware, sizes, step_bytes), wanted, sizes.training_bytes)


def on_gpus_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> int:
    """Bytes of the training cases' volumes that lie on any GPU of the machine."""
    cards = cards_together(recipe, hardware, sizes, step_bytes)[0]
    return min(cards * resident_bytes(recipe, hardware, sizes, step_bytes), sizes.training_bytes)


def tiers_text(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> str:
    """Where the volumes will lie, with the figures: `212 of 300 cases (38.1 GiB) on the GPU, the rest from pinned memory: …`."""
    resident, total = on_gpus_bytes(recipe, hardware, sizes, step_bytes), sizes.training_bytes
    name, cards = hardware.device_name, cards_together(recipe, hardware, sizes, step_bytes)[0]
    if resident == total:
        times, each = f"{cards} × " if cards > 1 else "", "each " if cards < hardware.local_ranks else ""
        of = f"the {times}{hardware.gpu_gib:.0f} GiB of {each}{name}"
        return f"about {size_in_memory(total)} of {of}; patches are cut there"
    there = sizes.training_cases * resident // max(total, 1)
    if step_bytes:
        validation = stitching_bytes(recipe, hardware, sizes)
        needs = f"a step takes {size_in_memory(step_bytes)} as measured and a validation {size_in_memory(validation)}"
    else:
        needs = f"volumes may take {UNMEASURED_SHARE:.0%} of it, since no step was measured"
    cases = counted(sizes.training_cases, "case")
    where = f"{cards} GPUs together" if cards > 1 else "each GPU" if hardware.local_ranks > 1 else "the GPU"
    return (
        f"{there:,} of {cases} ({size_in_memory(resident)}) on {where}, the rest from pinned memory: "
        f"{name} has {size_in_memory(_free(hardware))} free, and {needs}"
    )


def _free(hardware: Hardware) -> int:
    gib = hardware.gpu_gib if hardware.gpu_free_gib is None else hardware.gpu_free_gib
    return int((gib or 0.0) * GIB)


def window_bytes(recipe: Recipe, sizes: Sizes) -> int:
    """What the sliding window holds of the largest volume, in float32: the image, and twice the sums with their weights."""
    voxels = sizes.largest_case_bytes // voxel_bytes(recipe)
    return 4 * voxels * (recipe.input_channels // recipe.depth + 2 * (recipe.answer_channels + 1))


def stitching_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> int:
    """What the sliding window holds of the largest volume on the GPU."""
    return min(window_bytes(recipe, sizes), math.floor(_MOST_VALIDATION_SHARE * (hardware.gpu_gib or 0.0) * GIB))
