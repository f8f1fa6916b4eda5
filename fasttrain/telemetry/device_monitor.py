"""Owns the figures that the NVIDIA driver gives of one device while a run goes on: utilisation and memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

_GIB = 1024**3


@dataclass(frozen=True)
class DeviceReading:
    """Figures since the reading before; None where the driver gives none.

    utilisation: mean share of time in which a kernel ran, 0 to 1. gib: the most memory used, by this process where the
    driver knows it by its id, else by everything on the device (inside a container the driver sees other process ids).
    """

    utilisation: float | None = None
    gib: float | None = None


class DeviceMonitor:
    """Samples one device through NVML in a daemon thread; `read` gives the figures since the last `read`.

    device: the UUID as `torch.cuda.get_device_properties(i).uuid` gives it, with or without `GPU-`, since torch counts
    devices under CUDA_VISIBLE_DEVICES and NVML does not; or NVML's own index; or None for no device. Without a driver,
    or with a broken one, every figure is None and `unavailable_reason` says why; nothing is ever raised.
    """

    def __init__(self, device: str | int | None, interval_seconds: float = 0.2, process_id: int | None = None) -> None:
        self._interval_seconds = interval_seconds
        self._process_id = os.getpid() if process_id is None else process_id
        self._lock = threading.Lock()
        self._utilisation: list[float] = []
        self._gib: list[float] = []
        self._stop = threading.Event()
        self._nvml: Any = None
        self._handle: Any = None
        self._thread: threading.Thread | None = None
        self.unavailable_reason: str | None = "no device to watch" if device is None else self._attach(device)
        if self.unavailable_reason is None:
            self._thread = threading.Thread(target=self._run, name="device-monitor", daemon=True)
            self._thread.start()

    def read(self) -> DeviceReading:
        """The figures since the last call; a fresh sample where none has been taken since."""
        if self._nvml is None:
            return DeviceReading()
        with self._lock:
            empty = not (self._utilisation or self._gib)
        if empty:
            self._sample()
        with self._lock:
            utilisation, gib = self._utilisation, self._gib
            self._utilisation, self._gib = [], []
        return DeviceReading(sum(utilisation) / len(utilisation) if utilisation else None, max(gib) if gib else None)

    def close(self) -> None:
        """Stops sampling and leaves NVML; later readings are None. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        nvml, self._nvml = self._nvml, None
        # A call that hangs in the driver still holds the library; shutting it down under that call would crash.
        if nvml is not None and not (self._thread is not None and self._thread.is_alive()):
            _tried(nvml.nvmlShutdown)

    def _attach(self, device: str | int) -> str | None:
        """Opens NVML and finds the device; returns what went wrong, None where nothing did."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # a missing library, no driver, a driver of another version: all the same to a run
            return f"NVML is not available ({type(error).__name__}: {error})"
        for find, key in _lookups(pynvml, device):
            handle = _tried(find, key)
            if handle is not None:
                self._nvml, self._handle = pynvml, handle
                return None
        _tried(pynvml.nvmlShutdown)
        return f"NVML knows no device {device}"

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(self._interval_seconds)

    def _sample(self) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        rates = _tried(nvml.nvmlDeviceGetUtilizationRates, self._handle)
        used = self._used_bytes(nvml)
        with self._lock:
            if rates is not None:
                self._utilisation.append(rates.gpu / 100.0)
            if used is not None:
                self._gib.append(used / _GIB)

    def _used_bytes(self, nvml: Any) -> int | None:
        for process in _tried(nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ():
            if process.pid == self._process_id and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        memory = _tried(nvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if memory is None else int(memory.used)


def _lookups(nvml: Any, device: str | int) -> list[tuple[Any, str | int]]:
    """The ways to find the device, in order: torch leaves out the prefix that NVML wants."""
    if isinstance(device, int):
        return [(nvml.nvmlDeviceGetHandleByIndex, device)]
    bare = device.removeprefix("GPU-").removeprefix("MIG-")
    return [(nvml.nvmlDeviceGetHandleByUUID, text) for text in dict.fromkeys((f"GPU-{bare}", f"MIG-{bare}", device))]


def _tried(call: Any, *arguments: Any) -> Any:
    """The call's result, None where the driver refuses it: a figure that a device lacks is no fault of the run."""
    try:
        return call(*arguments)
    except Exception:
        return None
