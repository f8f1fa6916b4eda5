"""Owns which settings would let a run fit into the GPU's memory, estimated from what was measured before it ran out.

What a step or a window batch holds beyond the weights grows with the number of patches and their voxels: activations are kept for
each. So the need is a line, base + (need − base) × share, and a setting fits where that stays below what the process may have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fasttrain.engine.phases import FILLING, MEASURING, TRAINING, VALIDATION, GpuState
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.recipe import Recipe
from fasttrain.wording import counted, size_in_memory

_USABLE = 0.95
"""Of the memory: the rest is lost between blocks."""
_RECOMPUTED_SHARE = 0.7
"""Of activations that are kept where blocks are computed again, the block under way among them."""
_MOST_SHOWN = 2


def remedies(recipe: Recipe, state: GpuState, needed: int, checkpointed: bool = False) -> list[str]:
    """Up to two settings that would fit, the ones that change least of what is learnt first.

    needed: bytes that the phase wants at least. checkpointed: whether activations are computed again already.
    """
    if state.phase == FILLING:
        found = [_volumes_elsewhere(state, needed), _for_slots(recipe)]
    elif state.phase == VALIDATION:
        found = [
            _fewer_windows(recipe, state, needed),
            _volumes_elsewhere(state, needed),
            _smaller_step_beside(recipe, state, needed),
        ]
    else:
        found = [
            _fewer_patches(recipe, state, needed),
            _volumes_elsewhere(state, needed),
            None if checkpointed else _recomputed(state, needed),
            _smaller_patch(recipe, state, needed),
        ]
    return [text for text in found if text is not None][:_MOST_SHOWN]


def remedies_text(recipe: Recipe, state: GpuState, needed: int, checkpointed: bool = False) -> str:
    """The end of a sentence."""
    found = remedies(recipe, state, needed, checkpointed)
    if len(found) == 2:
        return f"by these figures either of these would fit: {found[0]}, or {found[1]}"
    if found:
        return f"by these figures this would fit: {found[0]}; else take a smaller network"
    return "by these figures no smaller batch or patch would fit: take a smaller network, or a GPU with more memory"


def does_not_fit(recipe: Recipe, hardware: Hardware, by_batch: Mapping[int, int], checkpointed: bool) -> str:
    """The sentence about a step that was too large when it was measured, with settings that would fit.

    by_batch: bytes that steps of fewer patches were measured to hold, by which the need of any batch is known.
    """
    batch, gib = recipe.training.batch_size, hardware.gpu_free_gib or hardware.gpu_gib or 0.0
    told = (
        f"{MEASURING}: {counted(batch, 'patch', 'patches')} of {list(recipe.patch.size)} do not fit into the {gib} GiB "
        f"that {hardware.device_name} has free"
    )
    if not by_batch:
        return f"{told}, nor would one; lower patch.size, or take a smaller network"
    base, needed = need_of_batch(by_batch, batch)
    shown = ", ".join(f"{count} held {size_in_memory(held)}" for count, held in sorted(by_batch.items()))
    state = GpuState(MEASURING, int(gib * GIB), base, max(by_batch.values()))
    return (
        f"{told}: {shown}, so {batch} would hold some {size_in_memory(needed)}; "
        f"{remedies_text(recipe, state, needed, checkpointed)}"
    )


def need_of_batch(by_batch: Mapping[int, int], batch: int) -> tuple[int, int]:
    """What is held whatever the batch, and what `batch` patches need, in bytes: by the line through the least and the largest of
    the measured {patches: bytes}. From a single one a line through zero is drawn, which errs upwards.
    """
    least, most = min(by_batch), max(by_batch)
    if least == most:
        return 0, by_batch[most] * batch // most
    slope = max((by_batch[most] - by_batch[least]) / (most - least), 0.0)
    base = max(by_batch[least] - slope * least, 0.0)
    return int(base), int(base + slope * batch)


def largest_batch(base: int, needed: int, limit: int, batch: int, effective: int) -> int | None:
    """The most patches, fewer than `batch` and a divisor of `effective`, that fit by the line through base and need."""
    return next(
        (
            fewer
            for fewer in range(batch - 1, 0, -1)
            if effective % fewer == 0 and _fits(base, needed, limit, fewer / batch)
        ),
        None,
    )


def largest_patch(
    base: int, needed: int, limit: int, size: tuple[int, ...], factors: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The patch had by shortening the longest axis again and again by what the network divides it by, once it fits.

    No axis falls below two voxels at the lowest stage, which a norm needs.
    """
    patch = list(size)
    while True:
        able = [axis for axis, length in enumerate(patch) if length - factors[axis] >= 2 * factors[axis]]
        if not able:
            return None
        longest = max(able, key=lambda axis: patch[axis])
        patch[longest] -= factors[longest]
        if _fits(base, needed, limit, math.prod(patch) / math.prod(size)):
            return tuple(patch)


def _fits(base: int, needed: int, limit: int, share: float) -> bool:
    return base + (needed - base) * share <= _USABLE * limit


def _fewer_patches(recipe: Recipe, state: GpuState, needed: int) -> str | None:
    batch, accumulate = recipe.training.batch_size, recipe.training.accumulate
    fewer = largest_batch(state.base, needed, state.limit, batch, batch * accumulate)
    if fewer is None:
        return None
    passes = batch * accumulate // fewer
    return f"training.batch_size={fewer} with training.accumulate={passes} (the same effective batch of {batch * accumulate})"


def _recomputed(state: GpuState, needed: int) -> str | None:
    if not _fits(state.base, needed, state.limit, _RECOMPUTED_SHARE):
        return None
    return "acceleration.activation_checkpointing=on"


def _smaller_patch(recipe: Recipe, state: GpuState, needed: int) -> str | None:
    size = tuple(recipe.patch.size)
    patch = largest_patch(state.base, needed, state.limit, size, recipe.network.downsampling(recipe.dimensions))
    return None if patch is None else f"patch.size=[{','.join(map(str, patch))}]"


def _volumes_elsewhere(state: GpuState, needed: int) -> str | None:
    if not state.volumes or needed - state.volumes > _USABLE * state.limit:
        return None
    return f"data.cache.kind=memory (the GPU holds {size_in_memory(state.volumes)} of volumes)"


def _for_slots(recipe: Recipe) -> str | None:
    batch = recipe.training.batch_size
    return (
        None
        if batch == 1
        else f"training.batch_size={batch // 2} with training.accumulate={2 * recipe.training.accumulate}"
    )


def _fewer_windows(recipe: Recipe, state: GpuState, needed: int) -> str | None:
    batch = recipe.validation.window.batch_size
    # The sums over the whole volume are held whatever the number of windows
    fixed = min(state.base + state.stitching, needed)
    fewer = next((one for one in range(batch - 1, 0, -1) if _fits(fixed, needed, state.limit, one / batch)), None)
    return None if fewer is None else f"validation.window.batch_size={fewer}"


def _smaller_step_beside(recipe: Recipe, state: GpuState, needed: int) -> str | None:
    """A recorded step keeps its memory while a validation runs."""
    held = max(state.peaks.get(TRAINING, 0) - state.base, state.step)
    batch, accumulate = recipe.training.batch_size, recipe.training.accumulate
    for fewer in range(batch - 1, 0, -1):
        if (batch * accumulate) % fewer == 0 and needed - held * (1 - fewer / batch) <= _USABLE * state.limit:
            return f"training.batch_size={fewer} with training.accumulate={batch * accumulate // fewer}"
    return None
