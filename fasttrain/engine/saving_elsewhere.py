"""Owns what a rank does about checkpoints that another one writes: nothing."""

from __future__ import annotations

from typing import Any


class SavedElsewhere:
    """Stands where a `Saver` stands in the rank that writes. figures: of what it wrote, which is nothing."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def due_within_epoch(self) -> bool:
        """Never."""
        return False

    def due_before_validation(self, seconds: float) -> bool:
        """Never."""
        return False

    def renew_last(self) -> None:
        """The rank that writes does."""

    def save_last(self) -> None:
        """The rank that writes does."""

    def save_epoch(self, is_best: bool, is_last: bool) -> None:
        """The rank that writes does."""

    def save_beside(self) -> None:
        """The rank that writes does."""

    def poll(self) -> None:
        """There is nothing to tell."""

    def finish(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to wait for."""

    def lost_best(self) -> bool:
        """Of a file that this rank does not write."""
        return False

    def standing(self) -> str:
        """What there is to go on from, in words."""
        return "the checkpoints of the first rank stand"
