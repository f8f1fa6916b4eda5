"""Owns a command's part in a run of several ranks: the first carries the command out, the others follow it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.machine.place import place
from fasttrain.machine.threads import wait_without_spinning

if TYPE_CHECKING:
    from fasttrain.machine.ranks import Ranks


class Several:
    """The ranks of this command, as soon as they have met."""

    def __init__(self) -> None:
        self._joined: Any = None

    @property
    def met(self) -> bool:
        """Whether there are others."""
        return self._joined is not None

    @property
    def ranks(self) -> Ranks:
        """All that train together."""
        from fasttrain.machine.ranks import ONLY_ONE

        return ONLY_ONE if self._joined is None else self._joined

    def meet(self, device: str) -> bool:
        """Meets the other ranks, if there are any; False in those that follow. Raises MachineError where they cannot be met."""
        seat = place(os.environ)
        if seat.alone:
            return True
        wait_without_spinning()
        import torch

        from fasttrain.machine.hardware import survey
        from fasttrain.machine.ranks import join

        chosen = survey(device, seat).torch_device
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        self._joined = join(seat, chosen)
        return seat.leads

    def follow(self, data: Path | None, device: str) -> int:
        """Does what the first rank says, and returns the exit code that it names. Raises what goes wrong here."""
        from fasttrain.cli.signals import stop_on_signals
        from fasttrain.engine.following import follow

        with stop_on_signals() as stop:
            stop.begun = True
            return follow(self.ranks, data, device, stop)

    def leave(self, code: int, failed: bool) -> None:
        """The command has ended: the first rank lets the others go. One that failed may have left them in the middle of a step."""
        if self._joined is None:
            return
        from fasttrain.engine.orders import Over

        if not failed:
            if self._joined.place.leads:
                self._joined.share(Over(code))
            self._joined.close()
        self._joined = None


SEVERAL = Several()
