"""Owns the search for what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first; empty where none is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.55)
    inside = [low for low in by_lower if len(name) > 2 and name.lower() in low and low not in found]
    return [by_lower[low] for low in [*found, *inside][:count]]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean a or b?` for the end of a sentence, or the whole choice where nothing is near and it is short."""
    known = list(candidates)
    close = nearest(name, known)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if known and len(known) <= 12:
        return f"; there are {', '.join(known)}"
    return ""
