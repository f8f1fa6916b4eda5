"""Owns what is on its way to the disk: a state with the files that are to hold it, and what became of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fasttrain.checkpoints import Snapshot
from fasttrain.errors import StorageError
from fasttrain.telemetry.events import Message

SPOT_SECONDS = 5.0
"""What a pod that is taken back leaves between its warning and its end."""


@dataclass(frozen=True)
class Written:
    """What became of one file."""

    path: Path
    size: int = 0
    seconds: float = 0.0
    fault: StorageError | None = None


@dataclass(eq=False)
class Job:
    """A state on its way to the disk; epoch, step: those it was taken at; fault: what kept it from there."""

    snapshot: Snapshot
    paths: tuple[Path, ...]
    epoch: int
    step: int
    pause_seconds: float
    fault: str = ""


def told_once(mib: float, seconds: float, pause_seconds: float, every: str) -> Message:
    """What a checkpoint takes, for a person to know what a kill can cost."""
    text = (
        f"a checkpoint of {mib:.1f} MiB takes {seconds:.2g} s to write; training waits {pause_seconds * 1e3:.0f} ms for it; "
        f"last.pt is renewed every {every}"
    )
    if seconds < SPOT_SECONDS - 1:
        return Message(text)
    return Message(
        f"{text}: a pod that ends {SPOT_SECONDS:g} s after its warning leaves the last one of these", "warning"
    )
