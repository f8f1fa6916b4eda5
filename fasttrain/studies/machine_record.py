"""Owns what a measurement holds for: the device, its memory, and the versions that speed hangs on."""

from __future__ import annotations

from typing import Any

from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.machine.nvml import opened

SAME_MACHINE = ("device_name", "gpu_bytes", "driver", "torch", "cudnn")
"""What must be as it was for a measurement to hold; on a CPU their number as well."""


def machine_record(hardware: Hardware) -> dict[str, Any]:
    """Plain values for JSON; bytes of a GPU's memory, in all and free now."""
    import torch

    return {
        "device": hardware.device,
        "device_name": hardware.device_name,
        "cpus": hardware.cpus,
        "gpu_bytes": None if hardware.gpu_gib is None else int(hardware.gpu_gib * GIB),
        "gpu_free_bytes": None if hardware.gpu_free_gib is None else int(hardware.gpu_free_gib * GIB),
        "driver": _driver() if hardware.on_gpu else None,
        "torch": torch.__version__,
        "cudnn": hardware.cudnn,
    }


def _driver() -> str | None:
    nvml = opened()
    if isinstance(nvml, str):
        return None  # no driver to ask is no reason not to measure
    try:
        return nvml.text("SystemGetDriverVersion")
    finally:
        nvml.close()
