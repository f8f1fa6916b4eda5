"""Owns the look at Python, torch and the driver, and whether these three fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fasttrain.machine.diagnosis.finding import Finding, Scene
from fasttrain.machine.driver import Driver
from fasttrain.machine.gpu_sight import cards_told, torch_for
from fasttrain.machine.visible_devices import VARIABLE


def python(scene: Scene) -> Iterator[Finding]:
    """The interpreter, and /proc, from which limits and memory are read."""
    yield Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    if sys.platform == "linux" and not Path("/proc/self/status").exists():
        told = "/proc is not mounted: memory, workers and mounts are guessed"
        yield Finding("proc", "warning", told, "mount -t proc proc /proc")


def torch(scene: Scene) -> Iterator[Finding]:
    """Whether it can be loaded, and what it was built for."""
    module = scene.torch
    if isinstance(module, str):
        told = f"cannot be imported ({module})"
        yield Finding("torch", "fault", told, "pip install --force-reinstall torch")
        return
    built = f"built for CUDA {module.version.cuda}" if module.version.cuda else "built without CUDA"
    yield Finding("torch", "ok", f"{module.__version__}, {built}")


def driver(scene: Scene) -> Iterator[Finding]:
    """NVIDIA's driver as it tells of itself, and the CUDA that it runs against the one that torch was built for."""
    found = scene.driver
    if isinstance(found, str):
        if scene.gpus:
            told = f"the GPU is there, but {found}: a run's figures of it (use, memory) stay empty"
            yield Finding(
                "driver", "warning", told, "pip install --force-reinstall nvidia-ml-py; nvidia-smi shows more"
            )
        return
    cuda = f", CUDA {found.cuda[0]}.{found.cuda[1]}" if found.cuda else ""
    yield Finding("driver", "ok", f"{found.version or 'of an unknown version'}{cuda}; {cards_told(found)}")
    yield from _match(scene, found)


def _match(scene: Scene, found: Driver) -> Iterator[Finding]:
    built = None if isinstance(scene.torch, str) else scene.torch.version.cuda
    if built is None or found.cuda is None:
        return
    newest = ".".join(map(str, found.cuda))
    if int(built.partition(".")[0]) <= found.cuda[0]:
        yield Finding("driver and torch", "ok", f"torch is built for CUDA {built}, the driver runs up to {newest}")
    elif scene.gpus:
        told = (
            f"torch is built for CUDA {built} and the driver runs up to {newest}: it works by a compatibility library"
        )
        yield Finding("driver and torch", "ok", told)
    else:
        told = f"torch is built for CUDA {built}, and the driver runs no more than CUDA {newest}"
        yield Finding("driver and torch", "fault", told, torch_for(found))


def visible_devices(scene: Scene) -> Iterator[Finding]:
    """Which of the driver's cards CUDA_VISIBLE_DEVICES leaves, and under which numbers."""
    text, found = scene.environ.get(VARIABLE), scene.driver
    if text is None or isinstance(found, str) or not found.cards:
        return
    chosen = found.chosen(scene.environ)
    if not chosen.cards:
        # Why there is no GPU is told where GPUs are looked at
        return
    if chosen.instance is not None:
        shown = f"cuda:0 is the MIG instance {chosen.instance} of card {chosen.cards[0]}"
    else:
        shown = ", ".join(f"cuda:{index} is card {number}" for index, number in enumerate(chosen.cards))
    order = ""
    if len({card.name for card in found.cards}) > 1 and scene.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA counts from the fastest card, the driver along the bus
        order = " (of unlike cards CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    told = f"{VARIABLE}={text!r}: {shown}{order}"
    if chosen.refused is not None:
        told = f"{told}; {chosen.refused!r} names no card, so that it and what follows it count for nothing"
        yield Finding("visible devices", "warning", told, f"export {VARIABLE}={','.join(map(str, chosen.cards))}")
    else:
        yield Finding("visible devices", "ok", told)
