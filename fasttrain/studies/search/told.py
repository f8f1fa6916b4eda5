"""Owns what a search says while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

PRUNED = "pruned"
"""The reason of the stop that ends a hopeless trial."""


@dataclass(frozen=True)
class Told:
    """A sentence about the search or one of its trials, for the person at the terminal; `level` is `info` or `warning`."""

    text: str
    level: str = "info"
