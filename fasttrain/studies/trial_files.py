"""Owns where the processes of a trial write what became of it, and what they print."""

from __future__ import annotations

from pathlib import Path


def answer_of(task: Path, rank: int) -> Path:
    """Where a rank writes what became of the trial whose task lies in a file."""
    return task.with_suffix(f".rank{rank}.answer.json" if rank else ".answer.json")


def log_of(log: str, rank: int) -> str:
    """Where a rank's stdout and stderr go."""
    return str(Path(log).with_suffix(f".rank{rank}.log")) if rank else log
