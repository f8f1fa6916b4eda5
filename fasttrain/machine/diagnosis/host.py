"""Owns the look at what the host gives this process: CPUs, memory, shared memory, open files, and how threads are set."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fasttrain.machine.diagnosis.finding import Finding, Scene
from fasttrain.machine.hardware import GIB
from fasttrain.machine.limits import cpu_limit, memory_free, memory_limit_bytes, shared_memory_free_bytes
from fasttrain.machine.open_files import open_file_limit
from fasttrain.machine.threads import THREAD_VARIABLES, thread_count
from fasttrain.wording import counted, size_in_memory

_LITTLE_MEMORY = 4 * GIB
_SMALL_SHARED = 64 << 20
"""What a container has in /dev/shm where nobody asked for more."""
_FEW_FILES = 1024
_PINNING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "GPU memory is not kept",
}
_OFF = ("", "0", "false", "disabled", "none")


def cpus(scene: Scene) -> Iterator[Finding]:
    """Those that this process may keep busy, against those that the host shows."""
    count, there = cpu_limit(), os.cpu_count() or 1
    bound = f" of {there}; affinity or the cgroup's quota leaves no more" if count < there else ""
    if scene.gpus and count < 2 * scene.gpus:
        told = f"{count}{bound}: too few to feed {counted(scene.gpus, 'GPU')} while it computes"
        yield Finding("cpus", "warning", told, "docker run --cpus 8 …, or a machine with more CPUs a GPU")
    else:
        yield Finding("cpus", "ok", f"{count}{bound}")


def memory(scene: Scene) -> Iterator[Finding]:
    """What is free, and what bounds it."""
    free, bound = memory_free()
    limit = memory_limit_bytes()
    of = f" of a container's {size_in_memory(limit)}" if limit is not None and "cgroup" in bound else ""
    told = f"{size_in_memory(free)}{of} free, bounded by {bound}"
    if free >= _LITTLE_MEMORY:
        yield Finding("memory", "ok", told)
    elif "ulimit" in bound:
        option = bound.rpartition(" ")[2].rstrip(")")
        yield Finding(
            "memory", "warning", f"{told}; that is little, and CUDA alone takes more", f"ulimit {option} unlimited"
        )
    else:
        mend = "docker run --memory 16g …, or end other programs" if "cgroup" in bound else "end other programs"
        yield Finding("memory", "warning", f"{told}; that is little", mend)


def shared_memory(scene: Scene) -> Iterator[Finding]:
    """The room by which loader workers hand over batches."""
    free = shared_memory_free_bytes()
    if free is None:
        yield Finding("shared memory", "ok", "not bounded")
        return
    told = f"{size_in_memory(free)} free in /dev/shm"
    if free > _SMALL_SHARED:
        yield Finding("shared memory", "ok", told)
    else:
        mend = "docker run --shm-size 8g …" if scene.container else "mount -o remount,size=8g /dev/shm"
        yield Finding("shared memory", "warning", f"{told}; loader workers will be threads or fewer", mend)


def open_files(scene: Scene) -> Iterator[Finding]:
    """Descriptors: each batch that a worker hands over takes some."""
    limit = open_file_limit()
    if limit is None:
        yield Finding("open files", "ok", "not bounded")
    elif limit >= _FEW_FILES:
        yield Finding("open files", "ok", f"{counted(limit, 'descriptor')} at once")
    else:
        told = f"{counted(limit, 'descriptor')} at once are few; loader workers will be threads"
        mend = "docker run --ulimit nofile=65536 …" if scene.container else "ulimit -n 65536"
        yield Finding("open files", "warning", told, mend)


def threads(scene: Scene) -> Iterator[Finding]:
    """How many a run computes with, what the environment says to the contrary, and what pins or slows them."""
    environ = scene.environ
    count, why = thread_count("auto", scene.gpus > 0)
    other = [f"{name}={environ[name]}" for name in THREAD_VARIABLES if environ.get(name, str(count)) != str(count)]
    over = f"; {', '.join(other)} of the environment does not count (acceleration.threads does)" if other else ""
    told = f"{count}: {why}{over}"
    pinned = [name for name in _PINNING if environ.get(name, "").lower() not in _OFF]
    slowing = [name for name in _SLOWING if scene.gpus and environ.get(name, "").lower() not in _OFF]
    if not pinned and not slowing:
        yield Finding("threads", "ok", told)
        return
    said = [f"{name} pins them, and loader workers with them, to a few CPUs" for name in pinned]
    said += [f"{name}={environ[name]}: {_SLOWING[name]}" for name in slowing]
    yield Finding("threads", "warning", f"{told}; {'; '.join(said)}", f"unset {' '.join([*pinned, *slowing])}")
