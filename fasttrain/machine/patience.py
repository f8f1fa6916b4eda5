"""Owns how long is waited for a call into a driver or a disk that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """What `work` gives or raises, run in a thread of its own; raises TimeoutError where it takes longer than `seconds`.

    A call that hangs keeps its thread, which does not keep the process from ending.
    """
    given: list[Any] = []
    raised: list[BaseException] = []

    def carry_out() -> None:
        try:
            given.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=carry_out, name="patience", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not given:
        raise TimeoutError(f"no answer within {seconds:g} s")
    result: Result = given[0]
    return result
