"""Owns volumes that are made before they are asked for, by forked processes, while this one waits for other work."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fasttrain.data.handed_over import mapped, written
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.seen_files import SEEN, key_of
from fasttrain.own_process import end_with_parent
from fasttrain.samples import Case

_NUMBER_BYTES = 4
_MOST_CASES = 8192
"""Their numbers lie in a pipe from the start, which holds 64 KiB."""
_TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def can_make_ahead() -> bool:
    """Whether this system forks and has memory without a name, as Linux has."""
    return hasattr(os, "fork") and hasattr(os, "memfd_create")


class MadeAhead:
    """Forks `processes` at once, which preprocess `work` in its order and hand each record over in memory without a name.

    Threads of this process would take turns with whatever else it does, and with each other for new pages of memory. A case that
    a process could not make, or died of, is left to whoever asks for it, who is then told its fault. Files that this process
    remembers (`SEEN`) are not read again. The processes touch no GPU, and end with this one.

    most_open: descriptors of records that nobody asked for yet, which `memory` hands on as they are.
    """

    def __init__(self, work: Sequence[tuple[Case, Preprocess]], processes: int, most_open: int = 0) -> None:
        self._work = list(work[:_MOST_CASES])
        self._numbers = {(case, how.training): number for number, (case, how) in enumerate(self._work)}
        self._made: dict[int, dict[str, Any] | int | None] = {}
        self._most_open = most_open
        self._changed = threading.Condition()
        self._over = False
        todo, numbers = os.pipe()
        os.write(numbers, b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in range(len(self._work))))
        os.close(numbers)
        self._taking, giving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._children: list[int] = []
        with giving:
            try:
                for _ in range(max(1, min(processes, len(self._work)))):
                    self._children.append(self._forked(todo, giving))
            except OSError:
                # Those that were begun do the work
                pass
            finally:
                os.close(todo)
        self._taker = threading.Thread(target=self._take, name="taking volumes", daemon=True)
        self._taker.start()

    def record(self, case: Case, training: bool) -> dict[str, Any] | None:
        """What `Preprocess` gives for the case, once it is there; None where it has to be made by the caller. Given once."""
        made = self._awaited(case, training)
        return mapped(made) if isinstance(made, int) else made

    def memory(self, case: Case, training: bool) -> int | None:
        """The like, as the descriptor of memory that holds the record."""
        made = self._awaited(case, training)
        return written(made) if isinstance(made, dict) else made

    def has_begun(self, case: Case, training: bool) -> bool:
        """Whether the case is among those that are made here."""
        return (case, training) in self._numbers

    def _awaited(self, case: Case, training: bool) -> dict[str, Any] | int | None:
        number = self._numbers.get((case, training))
        if number is None:
            return None
        with self._changed:
            self._changed.wait_for(lambda: number in self._made or self._over)
            made = self._made.pop(number, None)
        if made is not None:
            for path in (*case.images, case.label):
                # Made of it already
                SEEN.take(None if path is None else key_of(path))
        return made

    def close(self) -> None:
        """Ends the processes and gives up what nobody asked for."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._taker.join()
        for made in self._made.values():
            if isinstance(made, int):
                os.close(made)
        self._made.clear()

    def _take(self) -> None:
        """Until every process has ended."""
        with self._taking:
            while True:
                try:
                    word, descriptors, _, _ = socket.recv_fds(self._taking, _NUMBER_BYTES, 1)
                except OSError:
                    break
                if not word:
                    break
                made: dict[str, Any] | int | None = descriptors[0] if descriptors else None
                open_now = sum(isinstance(one, int) for one in list(self._made.values()))
                if made is not None and open_now >= self._most_open:
                    # Whoever asks then makes it
                    with contextlib.suppress(Exception):
                        made = mapped(descriptors[0])
                    made = made if isinstance(made, dict) else None
                with self._changed:
                    self._made[int.from_bytes(word, "little")] = made
                    self._changed.notify_all()
        for child in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        self._children = []
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _forked(self, todo: int, giving: socket.socket) -> int:
        # Blocked, so that a signal to the group can't end one that has not yet learnt to ignore it
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Of other threads' locks: a child takes none of theirs
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                self._become_maker(todo, giving)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return child

    def _become_maker(self, todo: int, giving: socket.socket) -> None:
        try:
            end_with_parent()
            # What the parent's objects hold, on a GPU even, is not this process's to give up
            gc.disable()
            for number in _TRAINERS_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            # Another thread may have held their locks
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            torch.set_num_threads(1)
            self._make(todo, giving)
        finally:
            # Nothing of the parent's is to be closed or flushed twice
            os._exit(0)

    def _make(self, todo: int, giving: socket.socket) -> None:
        while word := os.read(todo, _NUMBER_BYTES):
            case, how = self._work[int.from_bytes(word, "little")]
            memory = None
            with contextlib.suppress(Exception):
                memory = written(how(case))
            if memory is None:
                giving.send(word)
                continue
            socket.send_fds(giving, [word], [memory])
            os.close(memory)
