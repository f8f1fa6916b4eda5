"""Owns the figures that the NVIDIA driver gives of one device while a run goes on: utilisation and memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from fasttrain.machine.nvml import Nvml, opened
from fasttrain.machine.patience import within
from fasttrain.machine.visible_devices import VARIABLE

_GIB = 1024**3
_START_SECONDS = 5.0
_PATIENCE_SECONDS = 1.0


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
    or with a broken one, every figure is None and `unavailable_reason` says why; nothing is ever raised. A driver that hangs
    holds up the start for some seconds, a reading for one, and then no more.
    """

    def __init__(self, device: str | int | None, interval_seconds: float = 0.2, process_id: int | None = None) -> None:
        self._interval_seconds = interval_seconds
        self._process_id = os.getpid() if process_id is None else process_id
        self._sampled = threading.Condition()
        self._samples = 0
        self._waited_for: int | None = None
        self._utilisation: list[float] = []
        self._gib: list[float] = []
        self._stop = threading.Event()
        self._due = threading.Event()
        self._nvml: Nvml | None = None
        self._handle: Any = None
        self._thread: threading.Thread | None = None
        self.unavailable_reason: str | None = "no device to watch" if device is None else self._attach(device)
        if self.unavailable_reason is None:
            self._start()

    def read(self) -> DeviceReading:
        """The figures since the last call; a fresh sample where none has been taken since."""
        if self._nvml is None:
            return DeviceReading()
        with self._sampled:
            if not (self._utilisation or self._gib):
                self._await_sample()
            utilisation, gib = self._utilisation, self._gib
            self._utilisation, self._gib = [], []
        return DeviceReading(sum(utilisation) / len(utilisation) if utilisation else None, max(gib) if gib else None)

    def close(self) -> None:
        """Stops sampling and leaves NVML; later readings are None. May be called twice."""
        self._stop.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        nvml, self._nvml = self._nvml, None
        # A call that hangs in the driver still holds the library; shutting it down under that call would crash.
        if nvml is not None and not (self._thread is not None and self._thread.is_alive()):
            nvml.close()

    def _await_sample(self) -> None:
        """Lets the thread sample now and waits for it; the driver is never called from here, where a run would hang with it."""
        now = self._samples
        if now == self._waited_for:
            # It hung the last time and still does
            return
        self._due.set()
        if not self._sampled.wait_for(lambda: self._samples > now, timeout=_PATIENCE_SECONDS):
            self._waited_for = now

    def _attach(self, device: str | int) -> str | None:
        """Opens NVML and finds the device; returns what went wrong, None where nothing did."""
        nvml = opened()
        if isinstance(nvml, str):
            return nvml
        try:
            handle = within(_START_SECONDS, lambda: find_device(nvml, device))
        except Exception as error:
            return f"NVML does not answer ({type(error).__name__}: {error})"
        if handle is None:
            nvml.close()
            return f"NVML knows no device {device}"
        self._nvml, self._handle = nvml, handle
        return None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="device-monitor", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._nvml, self.unavailable_reason = None, f"the device cannot be watched ({error})"
        else:
            self._thread = thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            self._due.wait(self._interval_seconds)
            self._due.clear()

    def _sample(self) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        busy = getattr(nvml.ask("DeviceGetUtilizationRates", self._handle), "gpu", None)
        used = self._used_bytes(nvml)
        with self._sampled:
            if isinstance(busy, (int, float)) and 0 <= busy <= 100:
                self._utilisation.append(busy / 100.0)
            if used is not None:
                self._gib.append(used / _GIB)
            self._samples += 1
            self._sampled.notify_all()

    def _used_bytes(self, nvml: Nvml) -> int | None:
        processes = nvml.ask("DeviceGetComputeRunningProcesses", self._handle)
        for process in processes if isinstance(processes, (list, tuple)) else ():
            held = getattr(process, "usedGpuMemory", None)
            if getattr(process, "pid", None) == self._process_id and isinstance(held, int):
                return held
        used = getattr(nvml.ask("DeviceGetMemoryInfo", self._handle), "used", None)
        return used if isinstance(used, int) and used >= 0 else None


def find_device(nvml: Nvml, device: str | int, visible: str | None = None) -> Any:
    """The handle of the device, of a card in MIG mode that of the run's instance; None where there is none to be found.

    visible: CUDA_VISIBLE_DEVICES of the run; None: as it is in this process.
    """
    if isinstance(device, int):
        handle = nvml.ask("DeviceGetHandleByIndex", device)
    else:
        # torch leaves out the prefix that NVML wants
        bare = device.removeprefix("GPU-").removeprefix("MIG-")
        texts = dict.fromkeys((f"GPU-{bare}", f"MIG-{bare}", device))
        handle = next((one for text in texts if (one := nvml.ask("DeviceGetHandleByUUID", text)) is not None), None)
    instances = None if handle is None else nvml.instances(handle)
    if instances is None:
        return handle
    # The figures of the whole card would be those of its other instances' programs as well
    wanted = (os.environ.get(VARIABLE, "") if visible is None else visible).partition(",")[0]
    if wanted.startswith("MIG-"):
        return nvml.ask("DeviceGetHandleByUUID", wanted)
    return instances[0] if len(instances) == 1 else None
