"""Owns that processes which did parts of one work come to one outcome of it: what went wrong for any goes wrong for all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fasttrain.errors import DataError, MachineError, OutOfMemoryError, ran_out_of_memory, wants_memory

T = TypeVar("T")


def one_outcome(
    gather: Callable[[Any], list[Any]], work: Callable[[], T], give_up: Callable[[T], None] = lambda _: None
) -> T:
    """What `work` gives here, once it has ended for all whom `gather` reaches, each of whom calls this.

    Where it failed for any, its result is given up here, and all raise one DataError with the faults of all, each once, or what
    was raised first, by rank, that is no data fault. What is no Exception (Ctrl-C) is raised at once.
    """
    result: list[T] = []
    own: Exception | None = None
    try:
        result.append(work())
    except Exception as error:
        own = error
    outcomes = gather(None if own is None else sendable(own))
    worst = worst_of(outcomes)
    if worst is None:
        return result[0]
    for one in result:
        give_up(one)
    if own is not None and type(worst) is type(own) and str(worst) == str(own):
        # With the traceback that it has here
        raise own
    raise worst


def worst_of(outcomes: Sequence[Exception | None]) -> Exception | None:
    """What is to be raised where these were raised by several; None where nothing was."""
    failed = [one for one in outcomes if one is not None]
    others = [one for one in failed if not isinstance(one, DataError)]
    if others or len(failed) < 2:
        return next(iter(others or failed), None)
    return DataError(dict.fromkeys(fault for one in failed if isinstance(one, DataError) for fault in one.faults))


def sendable(error: Exception) -> Exception:
    """The error as another process can raise it: itself, or ours with its text where it does not survive the way."""
    # One whose arguments are its own need not survive it
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return OutOfMemoryError(text) if ran_out_of_memory(error) or wants_memory(error) else MachineError(text)
