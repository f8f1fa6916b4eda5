"""Owns the memory plan, from headers alone: what a run will hold against what is free, and so where volumes are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasttrain.data.caches import Window, require_lmdb, volumes_folder
from fasttrain.data.caches.keys import settings_digest
from fasttrain.data.inventory.sets import look_at
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine.choices import missing_for_kernels
from fasttrain.engine.sizes import Sizes
from fasttrain.engine.worker_plan import WORKER_BYTES, batch_bytes, batches_held, wanted_workers
from fasttrain.errors import MachineError, OutOfMemoryError, StorageError
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.machine.limits import disk_free_bytes
from fasttrain.recipe import Recipe
from fasttrain.wording import counted

MEMORY_SHARE = 0.7
"""Of the free memory that a cache chosen here may fill, batches and validation included: the network and the system need some."""
GPU_SHARE = 0.4
"""Of the GPU's memory that volumes kept there may fill: the step needs the rest."""
_DISK_SHARE = 0.8
_SET = "set in the recipe"
_STORED = ("disk", "lmdb")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the host's memory, all ranks together: volumes kept, workers with their batches, the largest validation."""

    volumes: int
    batches: int
    validation: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.volumes + self.batches + self.validation

    def __str__(self) -> str:
        parts = [("volumes", self.volumes), ("batches", self.batches), ("validation", self.validation)]
        named = ", ".join(f"{_size(count)} of {name}" for name, count in parts if count)
        return f"{amount(self.total)} ({named})" if sum(count > 0 for _, count in parts) > 1 else amount(self.total)


def memory_need(recipe: Recipe, hardware: Hardware, sizes: Sizes, cache: str, ranks: int = 1) -> MemoryNeed:
    """What a run holds under a kind of cache. Each of `ranks` processes keeps volumes, workers and batches of its own."""
    workers = wanted_workers(recipe, hardware, cache)[0]
    batches = (workers * recipe.data.prefetch_factor + batches_held(hardware)) * batch_bytes(recipe)
    # Threads are counted as processes here: which of the two they are is decided by what is left
    return MemoryNeed(
        volumes=ranks * _volume_bytes(recipe, sizes, cache),
        batches=ranks * (batches + workers * WORKER_BYTES),
        validation=ranks * validation_bytes(recipe, hardware, sizes),
    )


def validation_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> int:
    """What the sliding window holds of the largest case on a CPU: the image, and twice the probabilities with their weights."""
    if hardware.on_gpu:
        return 0
    channels, item = len(recipe.data.channels), 2 if recipe.data.storage_dtype == "float16" else 4
    voxels = sizes.largest_case_bytes // (channels * item + 1)
    return 4 * voxels * (channels + 2 * (recipe.data.class_count + 1))


def choose_cache(
    recipe: Recipe, hardware: Hardware, sizes: Sizes, former: Mapping[str, Any] | None = None, ranks: int = 1
) -> tuple[str, str]:
    """Where volumes are kept, and why.

    `auto` takes the GPU's memory where fasttrain's kernels run and no workers were asked for, the host's where that has room,
    else the disk where that has room, else `smart`, else nothing. The disk goes before `smart` since it changes nothing but
    speed: its files are mapped, so that the system keeps of them what memory has room for, and every case is still seen once a
    pass; under `smart` an epoch sees a part of the cases. `smart` is chosen for a new run only, and only where its window comes
    round to every case; an epoch has as many steps as under any other kind. `former` is the plan of the run that goes on here,
    whose order of cases must stand.

    Raises OutOfMemoryError or StorageError for a kind that the recipe asks for and that cannot fit, MachineError where it asks
    for a missing extra.
    """
    setting = recipe.data.cache.kind
    if setting == "auto":
        return _automatic(recipe, hardware, sizes, former, ranks)
    if setting == "gpu":
        _check_gpu(recipe, hardware, sizes, ranks)
    if setting == "lmdb":
        require_lmdb()
    if setting in ("memory", "smart"):
        _check_memory(setting, recipe, hardware, sizes, ranks)
    if setting in _STORED:
        _check_disk(setting, recipe, sizes)
    told = _window_text(recipe, sizes) if setting == "smart" else amount(sizes.cache_bytes)
    return setting, f"{_SET}; {told}"


def amount(count: int) -> str:
    """`about 1.5 GiB`."""
    return f"about {_size(count)}"


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _automatic(
    recipe: Recipe, hardware: Hardware, sizes: Sizes, former: Mapping[str, Any] | None, ranks: int
) -> tuple[str, str]:
    began_with = None if former is None else former.get("cache")
    if began_with == "smart":
        _check_memory("smart", recipe, hardware, sizes, ranks)
        return "smart", f"as the run began; {_window_text(recipe, sizes)}"
    need = memory_need(recipe, hardware, sizes, "memory", ranks)
    free = _free_text(hardware)
    if _leaves_enough(need, hardware):
        on_gpu = _gpu_text(recipe, hardware, sizes)
        return ("gpu", on_gpu) if on_gpu is not None else ("memory", f"{need} of {free}")
    why = f"memory would need {need}, more than {MEMORY_SHARE:.0%} of {free}"
    folder = _folder(recipe)
    room, stored = disk_free_bytes(folder), _stored_bytes("disk", recipe)
    there = f" and holds {_size(stored)} of them already" if stored else ""
    if sizes.cache_bytes <= room * _DISK_SHARE + stored:
        return "disk", f"{why}; the disk of {folder} has {_size(room)} free{there}"
    why = (
        f"{why}, nor would {amount(sizes.cache_bytes)} fit on the disk of {folder}, which has {_size(room)} free{there}"
    )
    window = memory_need(recipe, hardware, sizes, "smart", ranks)
    if began_with is None and _leaves_enough(window, hardware) and _comes_round(recipe, sizes):
        return "smart", f"{why}; {_window_text(recipe, sizes)}: an epoch sees these alone"
    return "none", f"{why}; cases are read whenever they are wanted"


def _gpu_text(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> str | None:
    """Why the GPU's memory is the place for the volumes; None where it is not."""
    if missing_for_kernels(hardware) is not None or recipe.data.workers not in ("auto", 0):
        return None
    assert hardware.gpu_gib is not None
    if sizes.cache_bytes > GPU_SHARE * hardware.gpu_gib * GIB:
        return None
    return f"{amount(sizes.cache_bytes)} of the {hardware.gpu_gib:.0f} GiB of {hardware.device_name}; patches are cut there"


def _check_gpu(recipe: Recipe, hardware: Hardware, sizes: Sizes, ranks: int) -> None:
    missing = missing_for_kernels(hardware)
    if missing is not None:
        raise MachineError(f"data.cache.kind: gpu cannot be had here: {missing}; use memory or auto")
    # They are read into the host's memory first
    _check_memory("gpu", recipe, hardware, sizes, ranks)
    assert hardware.gpu_gib is not None
    if sizes.cache_bytes > hardware.gpu_gib * GIB:
        raise OutOfMemoryError(
            f"data.cache.kind: gpu needs {amount(sizes.cache_bytes)} and {hardware.device_name} has {hardware.gpu_gib:.0f} GiB; "
            "set data.cache.kind: memory (or auto), or data.storage_dtype: float16"
        )


def _leaves_enough(need: MemoryNeed, hardware: Hardware) -> bool:
    return need.total <= MEMORY_SHARE * hardware.memory_free_gib * GIB


def _comes_round(recipe: Recipe, sizes: Sizes) -> bool:
    window = Window(recipe.data.cache, sizes.training_cases)
    return window.held + window.replaced * (sizes.epochs - 1) >= sizes.training_cases


def _volume_bytes(recipe: Recipe, sizes: Sizes, cache: str) -> int:
    if cache in ("memory", "gpu"):
        return sizes.cache_bytes
    if cache != "smart":
        return 0
    window = Window(recipe.data.cache, sizes.training_cases)
    return math.ceil(sizes.cache_bytes * window.most_in_memory / max(sizes.training_cases, 1))


def _window_text(recipe: Recipe, sizes: Sizes) -> str:
    window = Window(recipe.data.cache, sizes.training_cases)
    held = amount(_volume_bytes(recipe, sizes, "smart"))
    return f"{window.held} of {counted(sizes.training_cases, 'case')} in memory, {held}; {window.replaced} change after an epoch"


def _free_text(hardware: Hardware) -> str:
    return f"{hardware.memory_free_gib:.1f} GiB free, bounded by {hardware.memory_bound}"


def _check_memory(kind: str, recipe: Recipe, hardware: Hardware, sizes: Sizes, ranks: int) -> None:
    # Workers are lowered where memory is short, down to none: the batches that count are those of the trainer itself
    least = ranks * batches_held(hardware) * batch_bytes(recipe)
    need = replace(memory_need(recipe, hardware, sizes, kind, ranks), batches=least)
    if need.total <= hardware.memory_free_gib * GIB:
        return
    smaller = "cache_cases" if recipe.data.cache.cache_cases is not None else "cache_share"
    first = f"lower data.cache.{smaller}" if kind == "smart" else "set data.cache.kind: disk (or auto)"
    raised = "raise the container's memory limit" if "cgroup" in hardware.memory_bound else "take a machine with more"
    raise OutOfMemoryError(
        f"data.cache.kind: {kind} needs {need} and {hardware.memory_free_gib:.1f} GiB are free, bounded by "
        f"{hardware.memory_bound}; {first}, or {raised}"
    )


def _check_disk(kind: str, recipe: Recipe, sizes: Sizes) -> None:
    # Headers do not show how much a crop will cut away, and a disk that fills up is no worse than a refusal
    if recipe.data.crop_foreground is not None:
        return
    folder = _folder(recipe)
    room, stored = disk_free_bytes(folder), _stored_bytes(kind, recipe)
    if sizes.cache_bytes > room + stored:
        raise StorageError(
            f"data.cache.kind: {kind} needs {amount(sizes.cache_bytes)} and the disk of {folder} has {_size(room)} free; free "
            "some with `fasttrain data cache --clean`, or name another folder with data.cache.folder"
        )


def _folder(recipe: Recipe) -> Path:
    return volumes_folder(recipe.data.cache, os.environ, Path("runs"))


def _stored_bytes(kind: str, recipe: Recipe) -> int:
    """What lies in the cache of volumes with these settings: an unchanged rerun needs no more room."""
    digests = {settings_digest(Preprocess(recipe, training=training)) for training in (True, False)}
    sets = [look_at(kind, _folder(recipe) / kind / digest) for digest in digests]
    return sum(found.bytes for found in sets if found is not None)
