"""Owns the look at GPUs: whether there are any and why not, memory and who holds it, and a convolution that really runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fasttrain.machine.diagnosis.finding import Finding, Scene, failure_of, in_a_line
from fasttrain.machine.driver import Card, Driver
from fasttrain.machine.gpu_sight import Unseen, look, torch_for, why_unseen
from fasttrain.machine.hardware import GIB
from fasttrain.machine.patience import within
from fasttrain.wording import counted, size_in_memory

if TYPE_CHECKING:
    import torch

_KERNEL_SECONDS = 60.0
_MUCH_HELD = 0.05
"""Of a card's memory: what others hold above it may keep the planned batch from fitting."""


def gpus(scene: Scene) -> Iterator[Finding]:
    """One GPU after the other; where there is none, why."""
    if isinstance(scene.torch, str):
        return
    if not scene.gpus:
        yield no_gpu(why_unseen(look(scene.driver)))
        return
    for index in range(scene.gpus):
        yield from _gpu(scene, index)


def no_gpu(found: Unseen) -> Finding:
    """That torch sees no GPU: a fault where there is one and nobody hid it, else a warning, for a CPU trains too."""
    if found.fault:
        return Finding("gpu", "fault", found.told, found.mend)
    return Finding("gpu", "warning", f"{found.told}; training runs on the CPU", found.mend)


def _gpu(scene: Scene, index: int) -> Iterator[Finding]:
    import torch

    name, device = f"gpu {index}", torch.device("cuda", index)
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except Exception as error:
        yield Finding(
            name, "fault", f"cannot be asked for its memory: {in_a_line(error)}", "nvidia-smi; restart the pod"
        )
        return
    card = card_of(scene.driver, str(getattr(properties, "uuid", "")))
    part = ", in MIG mode: this is one instance of it" if card is not None and card.instances else ""
    yield Finding(name, "ok", f"{properties.name}, {total / GIB:.1f} GiB{part}")
    yield memory_of(name, total, free, card, scene.container)
    failure = failure_of(lambda: within(_KERNEL_SECONDS, lambda: _computes(device)))
    if failure is None:
        yield Finding(f"{name} kernel", "ok", "a 3D convolution and its gradient are what a CPU computes")
    else:
        yield Finding(f"{name} kernel", "fault", *_why_not(failure, properties, scene.driver))
    yield precisions(name, (properties.major, properties.minor))


def card_of(driver: Driver | str, uuid: str) -> Card | None:
    """The driver's card with torch's UUID, which lacks the prefix."""
    if isinstance(driver, str) or not uuid:
        return None
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for card in driver.cards:
        if any(one.endswith(bare) for one in (card.uuid, *(card.instances or ()))):
            return card
    return None


def memory_of(name: str, total: int, free: int, card: Card | None, in_a_container: bool = False) -> Finding:
    """What is free, and what others hold; by the driver's figure of before this process used the card, where there is one."""
    known = card is not None and card.held_bytes is not None and card.instances is None
    # Without it a few hundred MiB are CUDA's own
    held = card.held_bytes if known and card is not None else total - free
    much = (held or 0) > (_MUCH_HELD if known else 0.25) * total
    told = f"{size_in_memory(free)} of {size_in_memory(total)} free"
    if not much:
        return Finding(f"{name} memory", "ok", told)
    told = f"{told}; {size_in_memory(held or 0)} are held"
    processes = card.processes if card is not None else ()
    if not processes or in_a_container:
        # The driver counts processes as the host does: in a container another one may have that number
        count = f" by {counted(len(processes), 'process', 'processes')}" if processes else ""
        told, mend = (
            f"{told}{count} outside of this container or unseen",
            "nvidia-smi; end them, or rent another machine",
        )
    else:
        ids = " ".join(map(str, processes))
        told = f"{told} by {counted(len(processes), 'process', 'processes')} ({ids})"
        mend = f"nvidia-smi shows them; kill {ids}"
    return Finding(f"{name} memory", "warning", told, mend)


def precisions(name: str, capability: tuple[int, int]) -> Finding:
    """What the GPU's tensor cores take, by its compute capability."""
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Finding(f"{name} precision", "ok", f"{shown}: bf16, fp16 and TF32")
    if capability >= (7, 0):
        return Finding(f"{name} precision", "warning", f"{shown}: fp16 and no bf16; training takes fp16")
    told = "no tensor cores and too old for Triton; training takes float32 and torch's own kernels"
    return Finding(f"{name} precision", "warning", f"{shown}: {told}")


def _why_not(failure: str, properties: Any, driver: Driver | str) -> tuple[str, str]:
    import torch

    mine, built = f"{properties.major}{properties.minor}", torch.cuda.get_arch_list()
    fitting = [
        one
        for one in built
        if one.startswith(f"sm_{properties.major}") and len(one) == len(f"sm_{mine}") and one <= f"sm_{mine}"
    ]
    if built and not fitting and not any(one.startswith("compute_") for one in built):
        told = f"does not compute: this torch is built for {', '.join(built)}, the GPU is sm_{mine}"
        return told, torch_for(driver)
    return f"does not compute: {failure}", "nvidia-smi; restart the pod, and where that does not help rent another"


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
