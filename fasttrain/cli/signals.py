"""Owns how signals become a stop request, and how a process ends that cannot look at it in time: all of it, with no worker left.

The first signal asks: the run saves and ends in order. Where it does not look for a while (a compiler at work, a large case), a
thread of its own ends it as soon as nothing of its state changes. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

from fasttrain.cli.interruption import end_traceless
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.printing import tell
from fasttrain.cli.several import SEVERAL
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, exit_code_of

GRACE_SECONDS = 1.5
"""For a run to end in order; a pod that is taken back leaves about five."""
ONE_AND_THE_SAME_SECONDS = 0.2
"""`timeout`, a shell's job control and some supervisors send a signal to the process and to its group: that is one, not two."""
_SECONDS_TO_KNOW = 2.0
"""That another rank has ended; the system closes its end of the line."""
_SECONDS_FOR_ANOTHER = 12.0
"""Until what ends all has done so: the launcher kills soon after."""
_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGUSR1: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """A StopRequest that SIGINT, SIGTERM, SIGUSR1 and SIGHUP set while the scope lasts; before it is `begun` they end it all."""
    answer = _Answer(StopRequest())
    # A shell that runs a command with & has it ignore Ctrl-C, which is meant for what is in front, and nohup a lost terminal
    heard = [number for number in _CODES if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, answer.in_main_thread) for number in heard}
    answer.begin()
    SEVERAL.heed(answer.stop, answer.asked_by_another)
    try:
        yield answer.stop
    finally:
        answer.close()
        for number, handler in former.items():
            signal.signal(number, handler)


class _Answer:
    """Hears each signal twice: in the main thread, as soon as that runs Python, and in a thread of its own, at once."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self._owner = os.getpid()
        self._code = EXIT_TERMINATED
        self._first_at: dict[str, float] = {}
        """By whom of the two; each hears all."""
        self._told = self._launcher_heard = False
        self._over = threading.Event()
        self._ours, self._theirs = socket.socketpair()
        self._former_fd = -1

    def begin(self) -> None:
        """Starts the thread."""
        self._theirs.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def close(self) -> None:
        """The scope is over."""
        self._over.set()
        signal.set_wakeup_fd(self._former_fd)
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")

    def in_main_thread(self, number: int, _: FrameType | None) -> None:
        """The handler."""
        self._hear(number, "main")

    def _forget(self) -> None:
        """In a forked child: a signal to it is not one to this process, whose socket it shares."""
        if not self._over.is_set() and os.getpid() != self._owner:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        with self._ours, self._theirs:
            while not self._over.is_set():
                for number in self._ours.recv(64):
                    if number in _CODES and not self._over.is_set():
                        self._hear(number, "thread")

    def _hear(self, number: int, hearer: str) -> None:
        if os.getpid() != self._owner:
            return
        if not self._first_at and SEVERAL.ended_by_launcher(number):
            if not self._launcher_heard:
                self._launcher_heard = True
                threading.Thread(target=self._end_after_another, args=(number,), daemon=True).start()
            return
        self._answer(number, hearer)

    def _answer(self, number: int, hearer: str) -> None:
        now, name = time.monotonic(), signal.Signals(number)
        heard = bool(self._first_at)
        first = self._first_at.setdefault(hearer, now)
        if not heard:
            self._code = _CODES[name]
            # Before anything was begun there is nothing to end in order
            if not self.stop.begun:
                self._end("before anything was begun")
            self.stop.ask("Ctrl-C" if number == signal.SIGINT else name.name, self._code)
            if not SEVERAL.follows:
                # The first rank of several ends all
                threading.Thread(target=self._end_at_rest, name="signals-grace", daemon=True).start()
        elif now - first > ONE_AND_THE_SAME_SECONDS:
            self._code = _CODES[name]
            self._end("at once, by a second signal", final=False)

    def asked_by_another(self, code: int) -> None:
        """Another rank was told to stop, and with it all."""
        if not self._first_at and not SEVERAL.follows:
            self._code = code
            threading.Thread(target=self._end_at_rest, name="signals-grace", daemon=True).start()

    def _end_after_another(self, number: int) -> None:
        """Another rank has ended, and the launcher ends the others: whoever knows why says so and ends this one in time. Where
        none has, the signal was meant for this one.
        """
        until = time.monotonic() + _SECONDS_TO_KNOW
        while not SEVERAL.failing:
            if self._first_at or self._over.wait(0.1):
                return
            if time.monotonic() > until:
                self._answer(number, "launcher")
                return
        if not self._over.wait(_SECONDS_FOR_ANOTHER):
            os._exit(EXIT_TERMINATED)

    def _end_at_rest(self) -> None:
        """Where the run does not end by itself, but nothing of it changes either."""
        self._over.wait(GRACE_SECONDS)
        while not self._over.wait(0.1):
            try:
                self.stop.end_at_rest(lambda: self._end("where it was, with all that it had trained saved"))
            except Exception as error:
                # What 143 promises could not be kept
                self._code = exit_code_of(error)
                self._end(f"where it was; nothing newer than the last checkpoint could be saved: {error}")

    def _end(self, how: str, final: bool = True) -> None:
        goes_on = self.stop.goes_on_with
        SEVERAL.gone(self._code)
        if not self._told and not (final and self.stop.told) and not SEVERAL.follows:
            self._told = True
            _print(f"fasttrain: stopped {how}" + (f"; go on with: {goes_on}{ON_FINISH.option}" if goes_on else ""))
        end_traceless()
        if final and self._code == EXIT_INTERRUPTED and not SEVERAL.follows:
            ON_FINISH.carry_out(self._code)
        os._exit(self._code)


def say_stopped(stop: StopRequest, then: str) -> int:
    """One line of a command that was stopped in order, and what follows from that; gives the exit code."""
    tell(f"fasttrain: stopped by {stop.reason}; {then}")
    return stop.exit_code


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
