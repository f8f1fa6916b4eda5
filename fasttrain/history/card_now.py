"""Owns what the NVIDIA driver says of a run's card at this moment, asked from another process than the run's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fasttrain.machine.nvml import Nvml, opened
from fasttrain.machine.patience import within
from fasttrain.telemetry.device_monitor import find_device

_GIB = 1 << 30
_PATIENCE_SECONDS = 2.0
_CORE_SENSOR = 0


@dataclass(frozen=True)
class CardNow:
    """A card as it is now, with all that runs on it; None where the driver gives no figure.

    utilisation: share of the last moment in which a kernel ran, 0 to 1. temperature: of the core, in degrees Celsius.
    """

    utilisation: float | None = None
    used_gib: float | None = None
    total_gib: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    temperature: float | None = None

    def record(self) -> dict[str, float | None]:
        """Plain values for JSON."""
        return asdict(self)


class Card:
    """A card that is asked again and again. Where there is no driver, or it knows no such card, `why_not` says so.

    A driver that hangs is asked once and no more.
    """

    def __init__(self, uuid: str | None, visible: str | None = None) -> None:
        self.why_not: str | None = None
        self._nvml: Nvml | None = None
        self._handle: Any = None
        if uuid is None:
            self.why_not = "the run's card has no UUID that the driver could know it by"
            return
        nvml = opened()
        if isinstance(nvml, str):
            self.why_not = nvml
            return
        self._nvml = nvml
        self._handle = self._ask(lambda: find_device(nvml, uuid, visible or ""))
        if self._handle is None:
            self.why_not = self.why_not or "the driver of this machine knows no such card"

    def read(self) -> CardNow | None:
        """Its figures; None where there are none to be had."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None or self.why_not is not None:
            return None
        found: CardNow | None = self._ask(lambda: _figures(nvml, handle))
        return found

    def close(self) -> None:
        """Leaves NVML, unless a call still hangs in it."""
        if self._nvml is not None and self.why_not is None:
            self._nvml.close()
        self._nvml = None

    def _ask(self, call: Any) -> Any:
        try:
            return within(_PATIENCE_SECONDS, call)
        except Exception as error:
            self.why_not = f"the driver does not answer ({type(error).__name__}: {error})"
            return None


def _figures(nvml: Nvml, handle: Any) -> CardNow:
    busy = _number(getattr(nvml.ask("DeviceGetUtilizationRates", handle), "gpu", None))
    memory = nvml.ask("DeviceGetMemoryInfo", handle)
    used, total = _number(getattr(memory, "used", None)), _number(getattr(memory, "total", None))
    milliwatts = nvml.number("DeviceGetPowerUsage", handle)
    limit = nvml.number("DeviceGetEnforcedPowerLimit", handle)
    degrees = nvml.number("DeviceGetTemperature", handle, _CORE_SENSOR)
    return CardNow(
        utilisation=busy / 100 if busy is not None and busy <= 100 else None,
        used_gib=None if used is None else round(used / _GIB, 3),
        total_gib=None if total is None else round(total / _GIB, 3),
        watts=None if milliwatts is None else milliwatts / 1000,
        limit_watts=None if limit is None else limit / 1000,
        temperature=None if degrees is None else float(degrees),
    )


def _number(given: object) -> float | None:
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) and given >= 0 else None
