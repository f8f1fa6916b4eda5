"""Owns the memory plan, from headers alone: what a run will hold against what is free, and so where volumes are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasttrain.data.caches import require_lmdb, volumes_folder
from fasttrain.data.caches.keys import settings_digest
from fasttrain.data.inventory.sets import look_at
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine.planning.choices import missing_for_kernels
from fasttrain.engine.planning.gpu_memory import LEAST_SHARE, on_gpus_bytes, tiers_text, window_bytes
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.engine.planning.window_plan import check_parts, comes_round, held_bytes, window_text
from fasttrain.engine.planning.worker_plan import WORKER_BYTES, batch_bytes, batches_held, cut_bytes, wanted_workers
from fasttrain.errors import MachineError, OutOfMemoryError, StorageError
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.machine.limits import disk_free_bytes
from fasttrain.recipe import Recipe
from fasttrain.wording import counted, size_in_memory, sizes_apart

MEMORY_SHARE = 0.7
"""Of the free memory that a cache chosen here may fill, batches and validation included: the network and the system need some."""
_DISK_SHARE = 0.8
_SET = "set in the recipe"
_STORED = ("disk", "lmdb")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the host's memory, all ranks on it together: volumes kept, batches with the `workers` that make them, the largest
    validation; and before any of the last two, `building` of one volume.
    """

    volumes: int
    batches: int
    validation: int
    workers: int = 0
    building: int = 0

    @property
    def total(self) -> int:
        """The most at one time."""
        return self.volumes + max(self.batches + self.validation, self.building)

    def __str__(self) -> str:
        return self.text(size_in_memory(self.total))

    def text(self, total: str) -> str:
        """`about 6.0 GiB (5.0 GiB of volumes, 1.0 GiB of batches)`, with the total as it is given."""
        made = f"for {counted(self.workers, 'worker')} with batches" if self.workers else "of batches"
        parts = [("of volumes", self.volumes), (made, self.batches), ("of validation", self.validation)]
        if self.building > self.batches + self.validation:
            parts.append(("before, to make one volume", self.building))
        named = ", ".join(f"{size_in_memory(count)} {name}" for name, count in parts if count)
        return f"about {total} ({named})" if sum(count > 0 for _, count in parts) > 1 else f"about {total}"


def memory_need(recipe: Recipe, hardware: Hardware, sizes: Sizes, cache: str, resident: int = 0) -> MemoryNeed:
    """What a run holds under a kind of cache. The ranks of a machine share one copy of the volumes (under `smart` each keeps its
    own cases), and each has workers and batches of its own; `resident` bytes of volumes lie on GPUs.
    """
    ranks = hardware.local_ranks
    workers = wanted_workers(recipe, hardware, cache)[0]
    of_a_worker = WORKER_BYTES + (sizes.build_bytes if cache == "none" else 0)
    batches = (workers * recipe.data.prefetch_factor + batches_held(hardware)) * batch_bytes(recipe)
    if cache == "gpu":
        batches = cut_bytes(recipe, hardware) if resident < sizes.training_bytes else 0
    # Threads are counted as processes here: which of the two they are is decided by what is left
    return MemoryNeed(
        volumes=_volume_bytes(recipe, hardware, sizes, cache, resident),
        batches=ranks * (batches + workers * of_a_worker),
        validation=ranks * validation_bytes(recipe, hardware, sizes),
        workers=ranks * workers,
        building=ranks * sizes.build_bytes,
    )


def validation_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes) -> int:
    """What the sliding window holds of the largest case in the host's memory."""
    return 0 if hardware.on_gpu else window_bytes(recipe, sizes)


def choose_cache(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Sizes,
    former: Mapping[str, Any] | None = None,
    step_bytes: int = 0,
) -> tuple[str, str]:
    """Where volumes are kept, and why. `step_bytes`: what a measured step held of the GPU's memory, 0 where none was measured.

    `auto` takes the GPU's memory where fasttrain's kernels run and no workers were asked for (what that has no room for comes
    from the host's, patch by patch), the host's where that has room, else the disk where that has room, else `smart`, else
    nothing. The disk goes before `smart` since it changes nothing but speed: its files are mapped, so that the system keeps of
    them what memory has room for, and every case is still seen once a pass; under `smart` an epoch sees a part of the cases.
    `smart` is chosen for a new run only, and only where its window comes round to every case; an epoch has as many steps as under
    any other kind. `former` is the plan of the run that goes on here, whose order of cases must stand.

    Raises OutOfMemoryError or StorageError for a kind that the recipe asks for and that cannot fit, MachineError where it asks
    for a missing extra, and RecipeError for `smart` with fewer cases than ranks.
    """
    setting = recipe.data.cache.kind
    if setting == "auto":
        # The order of cases that `smart` began with must stand
        anew = former is None or former.get("cache") != "smart"
        on_gpu = _gpu_text(recipe, hardware, sizes, step_bytes) if anew else None
        return ("gpu", on_gpu) if on_gpu is not None else _automatic(recipe, hardware, sizes, former)
    if setting == "gpu":
        return _asked_gpu(recipe, hardware, sizes, former, step_bytes)
    if setting == "lmdb":
        require_lmdb()
    if setting == "smart":
        check_parts(sizes)
    if setting in ("memory", "smart"):
        _check_memory(setting, recipe, hardware, sizes)
    if setting in _STORED:
        _check_disk(setting, recipe, sizes)
    told = window_text(recipe, hardware, sizes) if setting == "smart" else amount(sizes.cache_bytes)
    if setting == "memory":
        told = str(memory_need(recipe, hardware, sizes, setting))
    free = f" of {_free_text(hardware)}" if setting in ("memory", "smart") else ""
    return setting, f"{_SET}; {told}{free}"


def choose_fill_threads(
    recipe: Recipe, hardware: Hardware, sizes: Sizes, cache: str, resident: int = 0
) -> tuple[int, str]:
    """How many volumes a rank makes at once, and why: one a CPU where memory has room for it beside the volumes that are kept.

    Raises OutOfMemoryError where there is no room for one.
    """
    # What is stored the first rank of a machine makes for all
    makers = 1 if cache in _STORED else hardware.local_ranks
    wanted, one = hardware.cpus * hardware.local_ranks // makers, makers * sizes.build_bytes
    room = int(hardware.memory_free_gib * GIB) - _volume_bytes(recipe, hardware, sizes, cache, resident)
    if not one or wanted * one <= room:
        return wanted, f"{counted(wanted, 'CPU')} may be used"
    if one > room:
        takes, left = sizes_apart(one, max(room, 0))
        raise OutOfMemoryError(
            f"to make the largest volume takes about {takes} of memory, and of {_free_text(hardware)}, {left} are left beside "
            f"what data.cache.kind: {cache} keeps; set a coarser data.spacing, leave large cases out, or {_more_memory(hardware)}"
        )
    return room // one, f"{counted(wanted, 'CPU')} may be used; lowered, since making a volume takes {amount(one)}"


def amount(count: int) -> str:
    """`about 1.5 GiB`."""
    return f"about {size_in_memory(count)}"


def _automatic(recipe: Recipe, hardware: Hardware, sizes: Sizes, former: Mapping[str, Any] | None) -> tuple[str, str]:
    began_with = None if former is None else former.get("cache")
    if began_with == "smart":
        check_parts(sizes)
        _check_memory("smart", recipe, hardware, sizes)
        return "smart", f"as the run began; {window_text(recipe, hardware, sizes)}"
    need = memory_need(recipe, hardware, sizes, "memory")
    free = _free_text(hardware)
    if _leaves_enough(need, hardware):
        return "memory", f"{need} of {free}"
    why = f"memory would need {need}, more than {MEMORY_SHARE:.0%} of {free}"
    folder = _folder(recipe)
    room, stored = disk_free_bytes(folder), _stored_bytes("disk", recipe)
    there = f" and holds {size_in_memory(stored)} of them already" if stored else ""
    if sizes.cache_bytes <= room * _DISK_SHARE + stored:
        return "disk", f"{why}; the disk of {folder} has {size_in_memory(room)} free{there}"
    disk = f"the disk of {folder}, which has {size_in_memory(room)} free{there}"
    why = f"{why}, nor would {amount(sizes.cache_bytes)} fit on {disk}"
    window = memory_need(recipe, hardware, sizes, "smart")
    if began_with is None and _leaves_enough(window, hardware) and comes_round(recipe, sizes):
        return "smart", f"{why}; {window_text(recipe, hardware, sizes)}: an epoch sees these alone"
    against = _against_window(recipe, hardware, sizes, window, began_with)
    return "none", f"{why}; smart {against}; cases are read whenever they are wanted"


def _against_window(
    recipe: Recipe, hardware: Hardware, sizes: Sizes, need: MemoryNeed, began_with: object | None
) -> str:
    """Why `smart` was not chosen."""
    if began_with is not None:
        return f"would change the order of cases that the run began with (data.cache.kind was {began_with})"
    if not _leaves_enough(need, hardware):
        return f"would need {need}, more than {MEMORY_SHARE:.0%} of what is free"
    if sizes.training_cases < sizes.ranks:
        return f"would have no case for some of {sizes.ranks} ranks"
    return f"would not come round to every case in {counted(sizes.epochs, 'epoch')}"


def _gpu_text(recipe: Recipe, hardware: Hardware, sizes: Sizes, step_bytes: int) -> str | None:
    """Why the GPU's memory is the place for the volumes; None where it is not."""
    if missing_for_kernels(hardware) is not None or recipe.data.workers not in ("auto", 0):
        return None
    resident = on_gpus_bytes(recipe, hardware, sizes, step_bytes)
    if resident < LEAST_SHARE * sizes.training_bytes:
        return None
    if not _leaves_enough(memory_need(recipe, hardware, sizes, "gpu", resident), hardware):
        return None
    return tiers_text(recipe, hardware, sizes, step_bytes)


def check_gpu_cache(recipe: Recipe, hardware: Hardware) -> None:
    """Raises MachineError where the recipe asks for a GPU cache and the machine can have none."""
    missing = missing_for_kernels(hardware) if recipe.data.cache.kind == "gpu" else None
    if missing is not None:
        raise MachineError(f"data.cache.kind: gpu cannot be had here: {missing}; use memory or auto")


def _asked_gpu(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Sizes,
    former: Mapping[str, Any] | None,
    step_bytes: int,
) -> tuple[str, str]:
    """`gpu` where it was asked for; what neither the GPU nor the host has room for goes where `auto` would put it."""
    check_gpu_cache(recipe, hardware)
    tiers = tiers_text(recipe, hardware, sizes, step_bytes)
    need = memory_need(recipe, hardware, sizes, "gpu", on_gpus_bytes(recipe, hardware, sizes, step_bytes))
    if need.total <= hardware.memory_free_gib * GIB:
        return "gpu", f"{_SET}; {tiers}"
    kind, why = _automatic(recipe, hardware, sizes, former)
    return (
        kind,
        f"gpu was asked for, but {tiers}, for which the host would need {need} of {_free_text(hardware)}; {why}",
    )


def _leaves_enough(need: MemoryNeed, hardware: Hardware) -> bool:
    return need.total <= MEMORY_SHARE * hardware.memory_free_gib * GIB


def _volume_bytes(recipe: Recipe, hardware: Hardware, sizes: Sizes, cache: str, resident: int = 0) -> int:
    """Of the host's memory, by all ranks on it."""
    if cache in ("memory", "gpu"):
        return sizes.cache_bytes - (resident if cache == "gpu" else 0)
    return held_bytes(recipe, hardware, sizes) if cache == "smart" else 0


def _free_text(hardware: Hardware) -> str:
    return f"{size_in_memory(hardware.memory_free_gib * GIB)} free, bounded by {hardware.memory_bound}"


def _check_memory(kind: str, recipe: Recipe, hardware: Hardware, sizes: Sizes) -> None:
    # Workers are lowered where memory is short, down to none: the batches that count are those of the trainer itself
    least = hardware.local_ranks * batches_held(hardware) * batch_bytes(recipe)
    need = replace(memory_need(recipe, hardware, sizes, kind), batches=least, workers=0)
    if need.total <= hardware.memory_free_gib * GIB:
        return
    smaller = "cache_cases" if recipe.data.cache.cache_cases is not None else "cache_share"
    first = f"lower data.cache.{smaller}" if kind == "smart" else "set data.cache.kind: disk (or auto)"
    needs, free = sizes_apart(need.total, hardware.memory_free_gib * GIB)
    raise OutOfMemoryError(
        f"data.cache.kind: {kind} needs {need.text(needs)} and {free} are free, bounded by "
        f"{hardware.memory_bound}; {first}, or {_more_memory(hardware)}"
    )


def _more_memory(hardware: Hardware) -> str:
    if "ulimit" in hardware.memory_bound:
        return "raise that limit"
    return "raise the container's memory limit" if "cgroup" in hardware.memory_bound else "take a machine with more"


def _check_disk(kind: str, recipe: Recipe, sizes: Sizes) -> None:
    # Headers do not show how much a crop will cut away, and a disk that fills up is no worse than a refusal
    if recipe.data.crop_foreground is not None:
        return
    folder = _folder(recipe)
    room, stored = disk_free_bytes(folder), _stored_bytes(kind, recipe)
    if sizes.cache_bytes > room + stored:
        needs, free = sizes_apart(sizes.cache_bytes, room)
        raise StorageError(
            f"data.cache.kind: {kind} needs about {needs} and the disk of {folder} has {free} free; "
            "free some with `fasttrain data cache --clean`, or name another folder with data.cache.folder"
        )


def _folder(recipe: Recipe) -> Path:
    return volumes_folder(recipe.data.cache, os.environ, Path("runs"))


def _stored_bytes(kind: str, recipe: Recipe) -> int:
    """What lies in the cache of volumes with these settings: an unchanged rerun needs no more room."""
    digests = {settings_digest(Preprocess(recipe, training=training)) for training in (True, False)}
    sets = [look_at(kind, _folder(recipe) / kind / digest) for digest in digests]
    return sum(found.bytes for found in sets if found is not None)
