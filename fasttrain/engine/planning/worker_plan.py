"""Owns how many workers make batches, of which kind and how far ahead: as many as the machine's limits leave room for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fasttrain.batches import box_bytes, slot_count
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.recipe import Recipe
from fasttrain.wording import counted

WORKER_BYTES = 128 << 20
"""What a forked worker writes to and so no longer shares with the trainer: mostly the interpreter's own pages."""
_MOST_AUTO_WORKERS = 8
_MOST_CUTTING_THREADS = 4
_SHARED_SHARE = 0.9
_SET = "set in the recipe"
_AHEAD = "batches that each worker has ready"
_FILES_OF_A_WORKER = 8
"""Descriptors: two pipes, its sentinel, the socket by which it hands over memory."""
_FILES_OF_A_BATCH = 2
_OWN_FILES, _OWN_FILES_ON_GPU = 64, 128
"""Descriptors that a trainer has open beside those of its workers."""


@dataclass(frozen=True)
class WorkerChoice:
    """`workers` processes or threads (`kind`), each `prefetch_factor` batches ahead; `reasons` by the decision's name."""

    workers: int
    prefetch_factor: int
    kind: str
    reasons: dict[str, str]


def batch_bytes(recipe: Recipe) -> int:
    """Of one batch on its way to the device: patches in float32 and their labels as they are kept."""
    voxels = recipe.training.batch_size * math.prod(recipe.patch.size)
    return voxels * (4 * recipe.patch_channels + recipe.task_facts.label_bytes)


def batches_held(hardware: Hardware) -> int:
    """Batches that the trainer holds beside those that workers have ready: the step's, and on a GPU the one that is copied."""
    return 2 if hardware.on_gpu else 1


def cutting_threads(hardware: Hardware) -> int:
    """Threads that cut boxes of cases for which the GPU has no room: each one's speed is that of memory."""
    return max(1, min(hardware.cpus - 1, _MOST_CUTTING_THREADS))


def cut_bytes(recipe: Recipe, hardware: Hardware) -> int:
    """Pinned memory in which they lie."""
    return slot_count(cutting_threads(hardware)) * box_bytes(recipe)


def wanted_workers(recipe: Recipe, hardware: Hardware, cache: str) -> tuple[int, str]:
    """The number of workers where nothing is short, and why."""
    setting = recipe.data.workers
    if cache == "gpu":
        return 0, "patches are cut on the GPU"
    if isinstance(setting, int):
        return setting, _SET
    if not hardware.on_gpu and cache == "memory":
        return 0, "the cases are in memory and the CPU's cores train"
    return max(1, min(hardware.cpus - 1, _MOST_AUTO_WORKERS)), f"{counted(hardware.cpus, 'CPU')} may be used"


def choose_workers(
    recipe: Recipe, hardware: Hardware, cache: str, spare_bytes: float, build_bytes: int = 0
) -> WorkerChoice:
    """Lowers first how far ahead workers are, then their number, until batches fit; `spare_bytes`: memory that the cache leaves.
    Where no volumes are kept, each worker takes `build_bytes` more for the one that it makes.

    Batches of processes travel through /dev/shm, each tensor by a descriptor. Where not even one worker's fit there, threads take
    their place, which need neither; where memory has no room for a worker at all, the trainer makes its own batches.
    """
    workers, why = wanted_workers(recipe, hardware, cache)
    ahead, setting = recipe.data.prefetch_factor, recipe.data.worker_kind
    kind = "process" if setting == "auto" else setting
    kind_why = _SET if setting != "auto" else "threads share the interpreter's lock with the training"
    if not workers:
        return _choice(0, ahead, kind, why, _AHEAD, _SET if setting != "auto" else "there are no workers")
    # Threads make volumes as well, and share nothing of them
    built = build_bytes if cache == "none" else 0
    shortage = lambda kind, w, a: _shortage(recipe, hardware, spare_bytes, kind, w, a, built)  # noqa: E731
    short = shortage(kind, workers, ahead)
    if short is None:
        return _choice(workers, ahead, kind, why, _AHEAD, kind_why)
    fitting = _most_that_fit(lambda w, a: shortage(kind, w, a) is None, workers, ahead)
    if fitting is None and kind == "process":
        kind, kind_why = "thread", f"not even one worker process would do: {short}"
        fitting = _most_that_fit(lambda w, a: shortage(kind, w, a) is None, workers, ahead)
    if fitting is None:
        return _choice(0, ahead, "process", f"{why}; none, since {short}", _AHEAD, "there are no workers")
    fewer, nearer = fitting
    lowered = f"lowered from {{}}, since {short}"
    why = f"{why}; {lowered.format(workers)}" if fewer < workers else why
    ahead_why = lowered.format(ahead) if nearer < ahead else _AHEAD
    return _choice(fewer, nearer, kind, why, ahead_why, kind_why)


def _choice(workers: int, ahead: int, kind: str, why: str, ahead_why: str, kind_why: str) -> WorkerChoice:
    return WorkerChoice(workers, ahead, kind, {"workers": why, "prefetch_factor": ahead_why, "worker_kind": kind_why})


def _most_that_fit(fits: Callable[[int, int], bool], workers: int, ahead: int) -> tuple[int, int] | None:
    """(workers, batches ahead): fewer batches before fewer workers, since a worker is a core and a batch only patience."""
    tries = [(workers, fewer) for fewer in range(ahead, 0, -1)] + [(fewer, 1) for fewer in range(workers - 1, 0, -1)]
    return next((one for one in tries if fits(*one)), None)


def _shortage(
    recipe: Recipe, hardware: Hardware, spare_bytes: float, kind: str, workers: int, ahead: int, built: int
) -> str | None:
    """What so many workers would lack, with the figures; None where they lack nothing."""
    one = batch_bytes(recipe)
    batches = (workers * ahead + batches_held(hardware)) * one
    asked = f"{workers} × {ahead} batches of {_megabytes(one)} and those in use need {_megabytes(batches)}"
    if kind == "process":
        room, files = hardware.shared_gib, hardware.open_files
        if room is not None and batches > _SHARED_SHARE * room * GIB / hardware.local_ranks:
            has = f"which has {_megabytes(room * GIB)} free"
            of_all = f" for {hardware.local_ranks} ranks" if hardware.local_ranks > 1 else ""
            return f"{asked} of /dev/shm, {has}{of_all} (a container gets more by --shm-size)"
        own = _OWN_FILES_ON_GPU if hardware.on_gpu else _OWN_FILES
        opened = own + workers * (_FILES_OF_A_WORKER + ahead * _FILES_OF_A_BATCH)
        if files is not None and opened > files:
            return f"they need some {opened} open files and the limit is {files} (`ulimit -n`)"
        batches += workers * WORKER_BYTES
    batches += workers * built
    if batches > spare_bytes:
        return f"they need {_megabytes(batches)} of memory and the cache leaves {_megabytes(max(spare_bytes, 0))}"
    return None


def _megabytes(count: float) -> str:
    """In units of 10^6 bytes, as shared memory and batches are spoken of: `16.8 MB`; what is less as `65.5 kB` or `12 bytes`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return counted(round(count), "byte")
