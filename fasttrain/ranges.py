"""Owns the names of the parts of a step: scopes that cost next to nothing until a profile listens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

PARTS = (
    "read",
    "decode",
    "preprocess",
    "cut",
    "augment",
    "copy",
    "forward",
    "backward",
    "optimiser",
    "graph",
    "validation",
)
"""Every name there is, in the order of a step. `graph` is a step that is replayed as one CUDA graph."""

Listener = Callable[[str], AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()
_listener: Listener | None = None


def part(name: str) -> AbstractContextManager[object]:
    """The scope of a part of a step, one of `PARTS`."""
    return _NOTHING if _listener is None else _listener(name)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A scope in which `listener` is entered with every part, by whichever thread; processes forked within hear it as well."""
    global _listener
    former, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = former
