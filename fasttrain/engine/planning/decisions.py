"""Owns how a choice of the machine's is recorded: what was decided, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One line of the plan, logged by `train` and kept in `plan.json`."""

    name: str
    value: str
    reason: str
