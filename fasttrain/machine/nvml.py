"""Owns the way to the NVIDIA driver's own library, through which nothing that is missing, broken or slow there ever raises."""

from __future__ import annotations

from typing import Any

from fasttrain.machine.patience import within

_PATIENCE_SECONDS = 5.0


class Nvml:
    """NVML, opened. `ask` gives None for whatever the driver refuses and the installed pynvml lacks."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the function `nvml<name>` gives; None where there is none, or it raises."""
        try:
            return getattr(self._module, f"nvml{name}")(*arguments)
        except Exception:
            return None

    def text(self, name: str, *arguments: Any) -> str | None:
        """As `ask`, for text, which older pynvml gives as bytes."""
        given = self.ask(name, *arguments)
        if isinstance(given, bytes):
            return given.decode(errors="replace")
        return given if isinstance(given, str) else None

    def number(self, name: str, *arguments: Any) -> int | None:
        """As `ask`, for whole numbers."""
        given = self.ask(name, *arguments)
        return given if isinstance(given, int) and not isinstance(given, bool) else None

    def handles(self) -> list[Any]:
        """Those of all cards, in the driver's order; None in the place of a card that cannot be opened."""
        return [self.ask("DeviceGetHandleByIndex", index) for index in range(self.number("DeviceGetCount") or 0)]

    def instances(self, handle: Any) -> list[Any] | None:
        """The handles of a card's MIG instances; None where it is not in MIG mode."""
        mode = self.ask("DeviceGetMigMode", handle)
        if not isinstance(mode, (list, tuple)) or not mode or mode[0] != 1:
            return None
        most = self.number("DeviceGetMaxMigDeviceCount", handle) or 0
        found = (self.ask("DeviceGetMigDeviceHandleByIndex", handle, index) for index in range(min(most, 64)))
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Leaves NVML."""
        self.ask("Shutdown")


def opened() -> Nvml | str:
    """NVML, or why it cannot be had."""

    def open_it() -> Nvml:
        import pynvml

        pynvml.nvmlInit()
        return Nvml(pynvml)

    try:
        return within(_PATIENCE_SECONDS, open_it)
    except (
        Exception
    ) as error:  # a missing library, no driver, one of another version, one that hangs: all the same to a run
        return f"NVML is not available ({type(error).__name__}: {error})"
