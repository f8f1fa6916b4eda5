"""Owns the examination of the machine that `doctor` shows: one finding a matter, each looked at and not assumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fasttrain.errors import wants_memory
from fasttrain.machine.compiler import missing_for_compile
from fasttrain.machine.cudnn import slow_cudnn, version_text
from fasttrain.machine.hardware import GIB, cudnn_of_torch, why_no_gpu
from fasttrain.machine.limits import cpu_limit, memory_free, shared_memory_free_bytes
from fasttrain.machine.open_files import open_file_limit
from fasttrain.wording import counted, size_in_memory

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warning", "fault"]
_LITTLE_MEMORY = 4 * GIB
_SMALL_SHARED = 64 << 20
"""What a container has in /dev/shm where nobody asked for more."""


@dataclass(frozen=True)
class Finding:
    """`name`: what was looked at; `told`: what was found, and what mends it where it is not `ok`."""

    name: str
    state: State
    told: str


def examine() -> list[Finding]:
    """Everything there is to look at, in an order in which what comes later rests on what comes before."""
    findings = [_python(), *_torch()]
    return [*findings, _cpus(), _memory(), _shared_memory(), _open_files()]


def _python() -> Finding:
    return Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _torch() -> list[Finding]:
    try:
        import torch
    except Exception as error:
        # An ImportError, an OSError of a library that it loads, or whatever else a broken installation raises
        if wants_memory(error):
            raise
        return [Finding("torch", "fault", f"cannot be imported ({_in_a_line(error)}); install it anew")]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    findings = [Finding("torch", "ok", f"{torch.__version__}, built {built}")]
    if not torch.cuda.is_available():
        return [*findings, no_gpu(why_no_gpu(), driver_there())]
    return [*findings, *(found for index in range(torch.cuda.device_count()) for found in _gpu(index)), *_for_kernels()]


def no_gpu(reason: str, driver: bool) -> Finding:
    """That torch sees no GPU: a fault where there is a driver and nobody hid it, else a warning, for a CPU trains too."""
    if driver and "hides" not in reason:
        remedy = "this machine has an NVIDIA driver: install a torch for CUDA, or mend the driver"
        return Finding("gpu", "fault", f"{reason}; {remedy}")
    return Finding("gpu", "warning", f"{reason}; training runs on the CPU")


def driver_there() -> bool:
    """Whether NVIDIA's driver shows a device to this system or container."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")


def _gpu(index: int) -> list[Finding]:
    import torch

    name, device = f"gpu {index}", torch.device("cuda", index)
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except Exception as error:
        return [Finding(name, "fault", f"cannot be asked for its memory: {_in_a_line(error)}; see `nvidia-smi`")]
    told = f"{properties.name}, {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    # A few hundred MiB are CUDA's own
    busy = total - free > 0.25 * total
    findings = [Finding(name, "warning" if busy else "ok", f"{told}{'; other programs use it' if busy else ''}")]
    failure = failure_of(lambda: _computes(device))
    computes = "computes what a CPU does" if failure is None else f"does not compute: {failure}"
    remedy = (
        ""
        if failure is None
        else "; is this torch built for that GPU (`torch.cuda.get_arch_list()`), and the driver new enough?"
    )
    findings.append(Finding(f"{name} kernel", "ok" if failure is None else "fault", f"{computes}{remedy}"))
    findings.append(precisions(name, (properties.major, properties.minor)))
    return findings


def failure_of(work: Callable[[], bool]) -> str | None:
    """Why `work` failed or, where it gave False, that it was wrong; None where all is well."""
    try:
        return None if work() else "the result is wrong"
    except Exception as error:
        return _in_a_line(error)


def precisions(name: str, capability: tuple[int, int]) -> Finding:
    """What the GPU's tensor cores take, by its compute capability."""
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Finding(f"{name} precision", "ok", f"{shown}: bf16, fp16 and TF32")
    if capability >= (7, 0):
        return Finding(f"{name} precision", "warning", f"{shown}: fp16 and no bf16; training takes fp16")
    told = "no tensor cores and too old for Triton; training takes float32 and torch's own kernels"
    return Finding(f"{name} precision", "warning", f"{shown}: {told}")


def _computes(device: torch.device) -> bool:
    """A convolution and its gradient on the GPU, against the CPU's."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, 6, 6, 6, generator=generator)
    weight = torch.randn(3, 2, 3, 3, 3, generator=generator)
    results = []
    for place in (torch.device("cpu"), device):
        # A copy: on the CPU `to` gives the tensor itself, whose copies elsewhere would be results and have no gradient
        kernel = weight.to(place, copy=True).requires_grad_()
        result = functional.conv3d(image.to(place), kernel)
        result.square().sum().backward()
        assert kernel.grad is not None
        results.append((result.detach().cpu(), kernel.grad.cpu()))
    # TF32 rounds to ten bits
    return all(bool((one - other).norm() <= 1e-2 * one.norm()) for one, other in zip(*results, strict=True))


def _for_kernels() -> list[Finding]:
    return [cudnn(cudnn_of_torch()), compiler(missing_for_compile())]


def cudnn(version: int | None) -> Finding:
    """cuDNN by the number that torch gives it."""
    if version is None:
        return Finding(
            "cudnn",
            "warning",
            "torch finds no cuDNN that it can use: convolutions are slow; install a torch that brings its own",
        )
    slow = slow_cudnn(version)
    return Finding("cudnn", "ok", version_text(version)) if slow is None else Finding("cudnn", "warning", slow)


def compiler(missing: str | None) -> Finding:
    """Triton with the C compiler and the headers that it needs when a kernel is used for the first time."""
    if missing is None:
        return Finding("kernels", "ok", "Triton, a C compiler and Python's headers are there")
    told = f"{missing}; training runs without fasttrain's own kernels and without volumes in the GPU's memory, which is slower"
    return Finding("kernels", "warning", told)


def _cpus() -> Finding:
    count, there = cpu_limit(), os.cpu_count() or 1
    bound = f" of {there}; affinity or the cgroup's quota leaves no more" if count < there else ""
    return Finding("cpus", "ok", f"{count}{bound}")


def _memory() -> Finding:
    free, bound = memory_free()
    state: State = "ok" if free >= _LITTLE_MEMORY else "warning"
    little = "" if state == "ok" else "; that is little: end other programs, or raise the container's limit"
    return Finding("memory", state, f"{size_in_memory(free)} free, bounded by {bound}{little}")


def _shared_memory() -> Finding:
    free = shared_memory_free_bytes()
    if free is None:
        return Finding("shared memory", "ok", "not bounded")
    told = f"{size_in_memory(free)} free in /dev/shm"
    if free <= _SMALL_SHARED:
        return Finding(
            "shared memory",
            "warning",
            f"{told}; loader workers are threads or fewer (a container gets more by --shm-size)",
        )
    return Finding("shared memory", "ok", told)


def _open_files() -> Finding:
    limit = open_file_limit()
    return Finding("open files", "ok", "not bounded" if limit is None else f"{counted(limit, 'descriptor')} at once")


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
