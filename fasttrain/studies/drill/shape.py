"""Owns how long the part of a recipe is that a drill trains, and what was chosen for it, as values its processes are given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Epochs, steps of each, how often a checkpoint is written, and the choices that were measured (None: still to be)."""

    epochs: int
    steps_per_epoch: int
    checkpoint_every: str
    amp: str | None = None
    channels_last: bool | None = None
    activation_checkpointing: bool | None = None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
