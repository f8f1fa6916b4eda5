"""Owns the examination of the machine that `doctor` shows: one look a matter, each made and not assumed, in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fasttrain.errors import wants_memory
from fasttrain.machine.diagnosis import disks, gpus, host, kernels, software
from fasttrain.machine.diagnosis.finding import Finding, Scene, State, in_a_line

LOOKS: dict[str, Callable[[Scene], Iterator[Finding]]] = {
    "python": software.python,
    "torch": software.torch,
    "driver": software.driver,
    "visible devices": software.visible_devices,
    "gpu": gpus.gpus,
    "cudnn": kernels.cudnn,
    "compiler": kernels.compiler,
    "cpus": host.cpus,
    "memory": host.memory,
    "shared memory": host.shared_memory,
    "open files": host.open_files,
    "threads": host.threads,
    "volume": disks.volumes,
    "space": disks.space,
    "speed": disks.speed,
}
"""In an order in which what comes later rests on what comes before."""


def examine(scene: Scene | None = None) -> Iterator[Finding]:
    """Everything there is to look at, each told as soon as it is found. A look that fails is a warning, and the rest goes on."""
    scene = scene or Scene()
    for name, look in LOOKS.items():
        try:
            yield from look(scene)
        except Exception as error:
            if wants_memory(error):
                raise
            yield Finding(name, "warning", f"cannot be looked at ({type(error).__name__}: {in_a_line(error)})")


__all__ = ["LOOKS", "Finding", "Scene", "State", "examine"]
