"""Owns how signals become a stop request: the first asks, the second ends the process at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from types import FrameType

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGUSR1: EXIT_TERMINATED,
}


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """A StopRequest that SIGINT, SIGTERM and SIGUSR1 set while the scope lasts; before it is `begun` they end the process."""
    stop = StopRequest()

    def answer(number: int, _: FrameType | None) -> None:
        code = _CODES[signal.Signals(number)]
        if stop.asked or not stop.begun:
            for child in multiprocessing.active_children():
                child.kill()
            if not stop.asked:
                os.write(2, b"fasttrain: stopped before anything was begun\n")
            os._exit(code)
        stop.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, code)

    former = {number: signal.signal(number, answer) for number in _CODES}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
