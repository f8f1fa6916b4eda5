"""A stand-in for the driver's library on PYTHONPATH; $FAKE_NVML is a JSON document: {"cards": [{"uuid", "name", "busy", "held",
"instances", "processes", "milliwatts", "limit", "degrees"}], "driver", "cuda", "init": what happens when it is opened, "figures":
what figures are like}.
"""

import json
import os
import time
from types import SimpleNamespace

_GIB = 1 << 30
_MIG = 1


class NVMLError(Exception):
    """As the real one."""


def _settings() -> dict:
    return json.loads(os.environ.get("FAKE_NVML", "{}"))


if _settings().get("init") == "absent":
    raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")


def _cards() -> list[dict]:
    return _settings().get("cards", [])


def nvmlInit() -> None:
    how = _settings().get("init")
    if how == "raises":
        raise NVMLError("Driver/library version mismatch")
    if how == "no driver":
        raise NVMLError("Driver Not Loaded")
    if how == "hangs":
        time.sleep(3600)
    if how == "odd":
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return _settings().get("driver", "580.95.05")


def nvmlSystemGetCudaDriverVersion() -> int:
    return _settings().get("cuda", 13000)


def nvmlDeviceGetCount() -> int:
    return len(_cards())


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    return _cards()[index]["uuid"]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    known = [card["uuid"] for card in _cards()] + [one for card in _cards() for one in card.get("instances") or ()]
    if uuid not in known:
        raise NVMLError("Not Found")
    return uuid


def _card(handle: str) -> dict:
    return next(card for card in _cards() if handle == card["uuid"] or handle in (card.get("instances") or ()))


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetName(handle: str) -> bytes:
    return _card(handle)["name"].encode()


def nvmlDeviceGetMigMode(handle: str) -> list[int]:
    instances = _card(handle).get("instances")
    if instances is None or handle in instances:
        raise NVMLError("Not Supported")
    return [_MIG, _MIG]


def nvmlDeviceGetMaxMigDeviceCount(handle: str) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: str, index: int) -> str:
    instances = _card(handle)["instances"]
    if index >= len(instances):
        raise NVMLError("Not Found")
    return instances[index]


def nvmlDeviceGetUtilizationRates(handle: str) -> object:
    card = _card(handle)
    if card.get("instances") is not None:
        raise NVMLError("Not Supported")
    figures = _settings().get("figures")
    if figures == "hang":
        time.sleep(3600)
    if figures == "nonsense":
        return SimpleNamespace(gpu="busy", memory=None)
    return SimpleNamespace(gpu=card.get("busy", 0), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> object:
    if _settings().get("figures") == "nonsense":
        return 17
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in _card(handle).get("processes", ())]


def nvmlDeviceGetMemoryInfo(handle: str, version: int | None = None) -> object:
    card = _card(handle)
    if _settings().get("figures") == "nonsense":
        return SimpleNamespace(total=None, used="much")
    if handle in (card.get("instances") or ()):
        return SimpleNamespace(total=10 * _GIB, used=1 * _GIB)
    return SimpleNamespace(total=80 * _GIB, used=int(card.get("held", 0) * _GIB))


def _given(handle: str, name: str) -> int:
    value = _card(handle).get(name)
    if value is None:
        raise NVMLError("Not Supported")
    return value


def nvmlDeviceGetPowerUsage(handle: str) -> int:
    return _given(handle, "milliwatts")


def nvmlDeviceGetEnforcedPowerLimit(handle: str) -> int:
    return _given(handle, "limit")


def nvmlDeviceGetTemperature(handle: str, sensor: int) -> int:
    return _given(handle, "degrees")
