"""Owns how counts are written in a sentence: with their noun (`1 epoch`, `3 epochs`), and as sizes in memory (`1.5 GiB`)."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 case`, `1,204 cases`; `plural` where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def size_in_memory(count: float) -> str:
    """Bytes as `31 MiB`, and from one GiB on as `1.5 GiB`."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
