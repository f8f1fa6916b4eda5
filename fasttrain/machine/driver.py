"""Owns what the NVIDIA driver says of this machine's cards: names, memory, who holds it, MIG instances, and what CUDA it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fasttrain.machine.nvml import Nvml, opened
from fasttrain.machine.patience import within
from fasttrain.machine.visible_devices import VARIABLE, Chosen, chosen

_PATIENCE_SECONDS = 5.0
_MEMORY_V2 = 0x02000028
"""NVML's number for the structure that counts the driver's own reserve apart from what is used."""


@dataclass(frozen=True)
class Card:
    """One card, whether CUDA may use it or not. `held_bytes`: what processes hold; `instances`: the UUIDs of its MIG instances,
    None where it is not in MIG mode; `processes`: ids of those that compute on it, as far as the driver knows them here.
    """

    uuid: str
    name: str
    total_bytes: int | None = None
    held_bytes: int | None = None
    processes: tuple[int, ...] = ()
    instances: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Driver:
    """`cuda`: the newest CUDA that it runs; cards in its own order, which is that of their places on the bus."""

    version: str | None
    cuda: tuple[int, int] | None
    cards: tuple[Card, ...]

    def chosen(self, environ: Mapping[str, str]) -> Chosen:
        """Which cards CUDA_VISIBLE_DEVICES leaves, and in which order."""
        instances = {number: card.instances for number, card in enumerate(self.cards) if card.instances}
        return chosen(environ.get(VARIABLE), [card.uuid for card in self.cards], instances)


def read_driver() -> Driver | str:
    """What NVML tells, or why it tells nothing. Never raises, and takes ten seconds at most."""
    nvml = opened()
    if isinstance(nvml, str):
        return nvml

    def ask() -> Driver:
        try:
            return _read(nvml)
        finally:
            nvml.close()

    try:
        return within(_PATIENCE_SECONDS, ask)
    except Exception as error:
        return f"NVML answers with nonsense or not at all ({type(error).__name__}: {error})"


def _read(nvml: Nvml) -> Driver:
    version = nvml.number("SystemGetCudaDriverVersion")
    cards = tuple(_card(nvml, handle, number) for number, handle in enumerate(nvml.handles()))
    return Driver(
        nvml.text("SystemGetDriverVersion"),
        None if version is None else (version // 1000, version % 1000 // 10),
        cards,
    )


def _card(nvml: Nvml, handle: Any, number: int) -> Card:
    memory = nvml.ask("DeviceGetMemoryInfo", handle, _MEMORY_V2) or nvml.ask("DeviceGetMemoryInfo", handle)
    instances = nvml.instances(handle)
    uuids = None if instances is None else tuple(filter(None, (nvml.text("DeviceGetUUID", one) for one in instances)))
    processes = nvml.ask("DeviceGetComputeRunningProcesses", handle)
    return Card(
        nvml.text("DeviceGetUUID", handle) or f"card {number}",
        nvml.text("DeviceGetName", handle) or "a GPU without a name",
        _bytes(memory, "total"),
        _bytes(memory, "used"),
        tuple(one.pid for one in processes if isinstance(getattr(one, "pid", None), int))
        if isinstance(processes, (list, tuple))
        else (),
        uuids,
    )


def _bytes(memory: Any, name: str) -> int | None:
    value = getattr(memory, name, None)
    return value if isinstance(value, int) and value >= 0 else None
