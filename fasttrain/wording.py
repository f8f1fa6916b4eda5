"""Owns how a count and its noun are written in a sentence: `1 epoch`, `3 epochs`."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 case`, `1,204 cases`; `plural` where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
