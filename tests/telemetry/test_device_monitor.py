"""The driver's figures through a stand-in for pynvml: here no card is needed, only its answers and its refusals."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from fasttrain.machine import nvml
from fasttrain.telemetry import device_monitor
from fasttrain.telemetry.device_monitor import DeviceMonitor, DeviceReading

GIB = 1024**3
NOTHING = DeviceReading(None, None)


class RefusedError(Exception):
    pass


class Driver(ModuleType):
    """Answers as pynvml does, for one device `GPU-1234` with index 3; anything in `broken` raises."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: set[str] = set()
        self.busy = [20, 40, 60]
        self.processes = [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB),
            SimpleNamespace(pid=1, usedGpuMemory=9),
        ]
        self.open = 0
        self.asked = 0

    def _answer(self, name: str, value: object) -> object:
        if name in self.broken or self.open < 1:
            raise RefusedError(name)
        return value

    def nvmlInit(self) -> None:
        if "init" in self.broken:
            raise RefusedError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid != "GPU-1234":
            raise RefusedError("not found")
        return self._answer("uuid", "handle")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        if index != 3:
            raise RefusedError("invalid argument")
        return self._answer("index", "handle")

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> object:
        percent = self.busy[min(self.asked, len(self.busy) - 1)]
        self.asked += 1
        return self._answer("utilisation", SimpleNamespace(gpu=percent, memory=1))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> object:
        return self._answer("processes", self.processes)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:
        return self._answer("memory", SimpleNamespace(used=5 * GIB))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("device", ["1234", "GPU-1234", 3])
def test_mean_utilisation_and_the_process_memory_since_the_last_read(driver: Driver, device: str | int) -> None:
    monitor = DeviceMonitor(device, interval_seconds=0.01)
    assert monitor.unavailable_reason is None
    wait_until(lambda: driver.asked >= 4)
    reading = monitor.read()
    monitor.close()
    assert 0.3 <= reading.utilisation <= 0.6
    assert reading.gib == pytest.approx(3.0)
    assert driver.open == 0
    assert monitor.read() == NOTHING


def test_a_reading_covers_only_the_time_since_the_one_before(driver: Driver) -> None:
    driver.busy = [100]
    monitor = DeviceMonitor("1234", interval_seconds=0.01)
    wait_until(lambda: driver.asked >= 3)
    assert monitor.read().utilisation == pytest.approx(1.0)
    driver.busy = [0]
    monitor.read()
    asked = driver.asked
    wait_until(lambda: driver.asked >= asked + 3)
    assert monitor.read().utilisation == 0.0
    monitor.close()


def test_reads_faster_than_the_sampling_still_have_a_figure(driver: Driver) -> None:
    monitor = DeviceMonitor("1234", interval_seconds=60)
    readings = [monitor.read() for _ in range(3)]
    monitor.close()
    assert all(reading.utilisation is not None and reading.gib is not None for reading in readings)


@pytest.mark.parametrize("unknown", ["other container", "no figure", "refused"])
def test_memory_is_the_devices_where_the_driver_does_not_know_the_process(driver: Driver, unknown: str) -> None:
    if unknown == "other container":
        driver.processes = [SimpleNamespace(pid=1, usedGpuMemory=7 * GIB)]
    elif unknown == "no figure":
        driver.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    else:
        driver.broken = {"processes"}
    monitor = DeviceMonitor("1234")
    assert monitor.read().gib == pytest.approx(5.0)
    monitor.close()


def test_one_figure_that_a_device_lacks_leaves_the_other(driver: Driver) -> None:
    driver.broken = {"utilisation"}
    monitor = DeviceMonitor("1234")
    assert monitor.read() == DeviceReading(None, pytest.approx(3.0))
    monitor.close()


def test_a_driver_that_fails_midway_gives_none_and_not_the_last_figures(driver: Driver) -> None:
    monitor = DeviceMonitor("1234", interval_seconds=0.01)
    wait_until(lambda: driver.asked >= 1)
    driver.broken = {"utilisation", "processes", "memory"}
    monitor.read()
    time.sleep(0.05)
    assert monitor.read() == NOTHING
    monitor.close()


def test_without_a_driver_every_figure_is_none_and_the_reason_is_told(driver: Driver) -> None:
    driver.broken = {"init"}
    monitor = DeviceMonitor("1234")
    assert monitor.read() == NOTHING
    assert "Driver Not Loaded" in (monitor.unavailable_reason or "")
    monitor.close()


def test_an_unknown_device_is_none_and_leaves_nvml_closed(driver: Driver) -> None:
    monitor = DeviceMonitor("9999")
    assert monitor.read() == NOTHING
    assert monitor.unavailable_reason == "NVML knows no device 9999"
    assert driver.open == 0
    monitor.close()


def test_without_the_module_or_a_device_every_figure_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device in ("1234", 0, None):
        monitor = DeviceMonitor(device)
        assert monitor.read() == NOTHING
        assert monitor.unavailable_reason
        monitor.close()
        monitor.close()


class Splittable(Driver):
    """The device is in MIG mode, with instances `MIG-a` and `MIG-b`."""

    instances = ("MIG-a", "MIG-b")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        return uuid if uuid in self.instances else super().nvmlDeviceGetHandleByUUID(uuid)

    def nvmlDeviceGetMigMode(self, handle: object) -> list[int]:
        if handle != "handle":
            raise RefusedError("an instance has no mode")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int) -> str:
        return self.instances[index]

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> object:
        raise RefusedError("not supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> object:
        return []

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:
        return SimpleNamespace(used={"handle": 70, "MIG-a": 1, "MIG-b": 2}[str(handle)] * GIB)


@pytest.mark.parametrize(
    ("instances", "visible", "gib"),
    [(("MIG-a", "MIG-b"), "MIG-b", 2.0), (("MIG-a",), None, 1.0), (("MIG-a", "MIG-b"), None, None), ((), None, None)],
)
def test_of_a_card_in_mig_mode_the_runs_instance_is_read_or_none(
    instances: tuple[str, ...], visible: str | None, gib: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Splittable()
    driver.instances = instances
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monitor = DeviceMonitor("1234")
    assert monitor.read() == DeviceReading(None, gib)
    assert (monitor.unavailable_reason is None) is (gib is not None)
    monitor.close()
    assert driver.open == 0


def test_a_module_without_functions_or_with_nonsense_is_empty_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", bare)
    monitor = DeviceMonitor("1234")
    assert monitor.read() == NOTHING
    assert "AttributeError" in (monitor.unavailable_reason or "")
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    driver.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu="busy")  # type: ignore[method-assign]
    driver.nvmlDeviceGetComputeRunningProcesses = lambda handle: 17  # type: ignore[method-assign]
    driver.nvmlDeviceGetMemoryInfo = lambda handle: None  # type: ignore[method-assign]
    monitor = DeviceMonitor("1234")
    assert monitor.unavailable_reason is None
    assert monitor.read() == NOTHING
    driver.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=101)  # type: ignore[method-assign]
    del driver.nvmlDeviceGetMemoryInfo
    driver.broken = {"memory"}
    assert monitor.read() == NOTHING
    monitor.close()


def test_a_driver_that_hangs_holds_a_run_up_once_and_briefly(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "_PATIENCE_SECONDS", 0.2)
    let_go = threading.Event()
    monitor = DeviceMonitor("1234", interval_seconds=0.01)
    wait_until(lambda: driver.asked >= 1)
    driver.nvmlDeviceGetUtilizationRates = lambda handle: let_go.wait(60)  # type: ignore[method-assign]
    time.sleep(0.05)
    monitor.read()
    began = time.monotonic()
    assert [monitor.read() for _ in range(20)] == [NOTHING] * 20
    assert time.monotonic() - began < 1.0
    let_go.set()
    monitor.close()


def test_a_driver_that_never_opens_ends_the_wait(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_PATIENCE_SECONDS", 0.1)
    let_go = threading.Event()
    driver.nvmlInit = lambda: let_go.wait(60)  # type: ignore[method-assign,assignment]
    monitor = DeviceMonitor("1234")
    assert monitor.read() == NOTHING
    assert "no answer within 0.1 s" in (monitor.unavailable_reason or "")
    let_go.set()
    monitor.close()


def test_the_installed_pynvml_never_raises_whatever_this_machine_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"):
        assert callable(getattr(pynvml, name))
    assert callable(pynvml.nvmlDeviceGetComputeRunningProcesses)
    monitor = DeviceMonitor(0)
    reading = monitor.read()
    monitor.close()
    assert (reading == NOTHING) or (0.0 <= (reading.utilisation or 0.0) <= 1.0)
