"""Owns how an error of torch or Python with a known cause becomes a sentence: memory or open files ran out, a killed worker."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

import torch

from fasttrain.batches import ended_worker
from fasttrain.engine.phases import GpuState
from fasttrain.engine.planning.remedies import remedies_text
from fasttrain.errors import DataError, FasttrainError, MachineError, OutOfMemoryError, RecipeError, ran_out_of_memory
from fasttrain.machine.open_files import open_file_limit
from fasttrain.recipe import Recipe
from fasttrain.recipe.network_spec import MonaiNetworkSpec
from fasttrain.wording import size_in_memory

_OUT_OF_FILES = re.compile(r"Too many open files|received \d+ items of ancdata", re.IGNORECASE)
_AMOUNT = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)
_UNITS = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@contextlib.contextmanager
def explaining(recipe: Recipe, workers: int = 0) -> Iterator[None]:
    """A scope whose errors leave as what `explained` makes of them."""
    try:
        yield
    except Exception as error:
        known = explained(error, recipe, workers)
        if known is None:
            raise
        raise known from error


def explained(
    error: BaseException,
    recipe: Recipe,
    workers: int,
    state: GpuState | None = None,
    phase: str | None = None,
    checkpointed: bool = False,
) -> FasttrainError | None:
    """The user's sentence for an error with a known cause; None for any other, and for what is a sentence already.

    state: the GPU's memory, where there is one; phase: what was under way; checkpointed: whether activations are computed again.
    """
    if isinstance(error, FasttrainError):
        # A file that could not be opened is no fault of the file
        return _out_of_files(error) if isinstance(error, DataError) else None
    return (
        ended_worker(error, workers)
        or _out_of_memory(error, recipe, state, phase, checkpointed)
        or _out_of_files(error)
        or _one_voxel(error, recipe)
    )


def asked_bytes(error: BaseException) -> int:
    """What an allocator was asked for when it had no more, by its own words; 0 where it does not say."""
    amount = _AMOUNT.search(str(error))
    if amount is None:
        return 0
    number, _, unit = amount[1].partition(" ")
    return int(float(number) * _UNITS.get(unit, 0))


def _one_voxel(error: BaseException, recipe: Recipe) -> RecipeError | None:
    """A batch norm has no spread to learn from where a channel is one number; which networks meet it shows in the first step."""
    if not isinstance(error, ValueError) or not str(error).startswith("Expected more than 1 "):
        return None
    key = "network.name" if isinstance(recipe.network, MonaiNetworkSpec) else "network.kind"
    return RecipeError(
        f"{key}: a norm layer of this network sees a single voxel of a patch of {list(recipe.patch.size)}; raise patch.size or "
        f"training.batch_size (now {recipe.training.batch_size})"
    )


def _out_of_files(error: BaseException) -> MachineError | None:
    by_number = isinstance(error, OSError) and error.errno == errno.EMFILE
    by_text = isinstance(error, RuntimeError | DataError) and _OUT_OF_FILES.search(str(error)) is not None
    if not (by_number or by_text):
        return None
    return MachineError(
        f"too many files are open: the limit is {open_file_limit()}; raise it (`ulimit -n 4096`), or lower data.workers or set "
        "data.worker_kind: thread"
    )


def _out_of_memory(
    error: BaseException, recipe: Recipe, state: GpuState | None, phase: str | None, checkpointed: bool
) -> OutOfMemoryError | None:
    if not isinstance(error, torch.OutOfMemoryError) and not ran_out_of_memory(error):
        return None
    on_gpu = isinstance(error, torch.OutOfMemoryError) or "CU" in str(error)
    amount = _AMOUNT.search(str(error))
    during = f" in {phase}" if phase else ""
    asked = f"{during} when {_readable(amount[1])} more were asked for" if amount else during
    if on_gpu and state is not None:
        return OutOfMemoryError(_gpu_text(error, recipe, state, asked, checkpointed))
    training, window = recipe.training, recipe.validation.window
    batch, patch = training.batch_size, list(recipe.patch.size)
    smaller = f"training.batch_size (now {batch}), patch.size (now {patch}), the size of the network"
    if on_gpu:
        return OutOfMemoryError(
            f"the GPU ran out of memory{asked}; lower {smaller} or validation.window.batch_size (now {window.batch_size})"
        )
    return OutOfMemoryError(
        f"this machine ran out of memory{asked}; lower {smaller} or data.workers, or set data.cache.kind: none"
    )


def _gpu_text(error: BaseException, recipe: Recipe, state: GpuState, asked: str, checkpointed: bool) -> str:
    """With what each phase held, and settings that would have fitted."""
    # A step that was broken off shows less than it needs: what was measured of one before counts as well
    needed = max(state.peak + asked_bytes(error), state.base + state.step, int(state.limit * 1.01))
    held = {**state.peaks, state.phase: max(state.peak, state.peaks.get(state.phase, 0))}
    shown = ", ".join(f"{size_in_memory(count)} in {name}" for name, count in held.items() if count)
    return (
        f"the GPU ran out of memory{asked}: it held at most {shown}, of {size_in_memory(state.limit)} that may be used; "
        f"{remedies_text(recipe, state, needed, checkpointed)}"
    )


def _readable(amount: str) -> str:
    """torch's CPU allocator counts in bytes (`32768000000 bytes`), CUDA's in units (`20.00 GiB`)."""
    number, _, unit = amount.partition(" ")
    return size_in_memory(float(number)) if unit in ("", "bytes") else amount
