"""Owns what a fetch tells while it goes on."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Whoever wants to hear of a fetch: a progress bar, a log."""

    def say(self, sentence: str) -> None:
        """Takes one sentence for the person who waits."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Takes how far the work called `what` has come, in bytes; `done` may fall where it starts over."""


def size_text(size: float) -> str:
    """`512 B`, `27.1 MiB`, `6.6 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
