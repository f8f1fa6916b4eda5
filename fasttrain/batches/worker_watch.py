"""Owns the watch over workers: whether they live and move, and the sentence that says which case and what cause ended one."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess

import psutil

from fasttrain.batches.whereabouts import Whereabouts
from fasttrain.errors import FasttrainError, MachineError, OutOfMemoryError
from fasttrain.machine.limits import oom_kills

MOST_SECONDS_WITHOUT_A_MOVE = 300.0
"""A single case of hundreds of megabytes may take a minute from a slow disk; after five a read will not end."""
LOOK_SECONDS = 5.0
"""How often the trainer looks at workers while it waits for a batch."""
_SECONDS_TO_DIE = 2.0
LOST_BATCH = 71
"""The exit code of a worker whose finished batch could not be sent."""
_ENDED = re.compile(r"DataLoader worker \(pid|Pin memory thread exited unexpectedly")
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}

_watches: weakref.WeakSet[WorkerWatch] = weakref.WeakSet()
"""torch's handler of a worker's death raises wherever the trainer is just then, with nothing that leads to the loader."""


class WorkerWatch:
    """Watches the workers of one loader. `case_names` are the names of the cases by index, as far as they are known."""

    def __init__(
        self,
        table: Whereabouts,
        case_names: Sequence[str],
        most_seconds: float = MOST_SECONDS_WITHOUT_A_MOVE,
        kills: Callable[[], int | None] = oom_kills,
    ) -> None:
        self.broken = False
        """True once a worker has died or hangs: what is shared with the others may be locked for ever."""
        self._table = table
        self._names = case_names
        self._most_seconds = most_seconds
        self._kills = kills
        self._kills_before: int | None = None
        self._processes: Sequence[BaseProcess] = ()
        self._moves: tuple[int, ...] = ()
        self._idle_seconds = 0.0
        self._hang: str | None = None
        self._last_resort: _LastResort | None = None

    def begin(self, processes: Sequence[BaseProcess]) -> None:
        """New workers have begun; none where they are threads."""
        self.broken, self._processes = False, processes
        self._kills_before = self._kills()
        self._moves, self._idle_seconds, self._hang = (), 0.0, None
        _watches.add(self)
        if processes:
            self._last_resort = _LastResort(self._table, self._most_seconds, self._kill)

    def end(self) -> None:
        """The workers are told to end, and their ends mean nothing any more."""
        if self._last_resort is not None:
            self._last_resort.close()
            self._last_resort = None
        self._processes = ()
        _watches.discard(self)

    def check(self, waited_seconds: float) -> None:
        """To be called while the trainer waits for a batch, every `waited_seconds`; raises where none can be hoped for.

        Seconds are those of the trainer's own waiting: a run that is stopped and continued does not count as one that hangs.
        """
        if (known := self.death()) is not None:
            raise known
        moves = self._table.moves()
        self._idle_seconds = self._idle_seconds + waited_seconds if moves == self._moves else 0.0
        self._moves = moves
        if self._idle_seconds >= self._most_seconds:
            self.broken = True
            raise MachineError(self._hang_text())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A scope in which the trainer waits for a worker, if need be in a read that no look from time to time breaks off."""
        if self._last_resort is None:
            yield
            return
        self._last_resort.waiting = True
        try:
            yield
        finally:
            self._last_resort.waiting = False

    def received(self) -> None:
        """A batch has come."""
        self._idle_seconds = 0.0

    def death(self) -> FasttrainError | None:
        """The sentence about a worker process that ended by itself, or that hung and was ended; None where all live."""
        for worker, process in enumerate(self._processes):
            code = process.exitcode
            if code is not None:
                self.broken = True
                return (
                    MachineError(self._hang) if self._hang is not None else self._death_error(worker, process.pid, code)
                )
        return None

    def death_soon(self) -> FasttrainError | None:
        """`death`, waited for a little: what a worker was sending breaks off before the system says that it has died."""
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < deadline and self._processes:
            # Where torch's handler raises it is here, and says no more than the next look
            with contextlib.suppress(RuntimeError):
                if (known := self.death()) is not None:
                    return known
                time.sleep(0.02)
        return self.death()

    def _kill(self) -> None:
        """Ends workers that hang while the trainer is in a read from one of them, which breaks off the read."""
        self._hang = self._hang_text()
        for process in self._processes:
            process.kill()

    def _death_error(self, worker: int, pid: int | None, code: int) -> FasttrainError:
        how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        told = f"a data loader worker ended: pid {pid} {how} {self._where(worker)}"
        fewer = f"lower data.workers (now {self._table.workers}) or data.prefetch_factor"
        before, now = self._kills_before, self._kills()
        if code == -signal.SIGKILL and before is not None and now is not None and now > before:
            return OutOfMemoryError(
                f"{told}, since the system ran out of memory (the cgroup's oom_kill count rose from {before} to {now}); {fewer}, "
                "set data.cache.kind: disk, or raise the memory limit"
            )
        if code == -signal.SIGBUS:
            return OutOfMemoryError(
                f"{told}: /dev/shm or the disk of a mapped file is full; {fewer}, or give a container more by --shm-size"
            )
        if -code in _FAULTS:
            return MachineError(f"{told}: native code failed; look at that case with `fasttrain check`; {fewer}")
        if code == LOST_BATCH:
            return MachineError(
                f"{told}, for it could not send its batch: /dev/shm or the open-file limit (`ulimit -n`) is used up; {fewer}, or "
                "set data.worker_kind: thread"
            )
        return MachineError(f"{told}; if memory is short, {fewer}")

    def _where(self, worker: int) -> str:
        case = self._table.case_of(worker)
        return "between two cases" if case is None else f"while it was at case {self._name(case)}"

    def _name(self, case: int) -> str:
        return self._names[case] if case < len(self._names) else f"number {case + 1}"

    def _hang_text(self) -> str:
        told = [text for worker in range(self._table.workers) if (text := self._standstill(worker)) is not None]
        more = f"; and {len(told) - 4} more" if len(told) > 4 else ""
        doing = f"{'; '.join(told[:4])}{more}" if told else "none is at a case, so that a batch was lost on its way"
        return (
            f"the data loader's workers have not moved for {self._most_seconds:.0f} s: {doing}; see whether the files can be "
            "read (a network disk may no longer answer), then `fasttrain resume`"
        )

    def _standstill(self, worker: int) -> str | None:
        """What a worker does that does not move; None for one that waits for work."""
        case, who, state = self._table.case_of(worker), f"thread {worker + 1}", ""
        if worker < len(self._processes):
            pid = self._processes[worker].pid
            who = f"pid {pid}"
            with contextlib.suppress(psutil.Error):
                state = psutil.Process(pid).status()
        if case is None and state != psutil.STATUS_STOPPED:
            return None
        place = "is between two cases" if case is None else f"is at case {self._name(case)}"
        return f"{who}{f' ({state})' if state else ''} {place}"


class _LastResort:
    """A thread that ends hanging workers where the trainer, which waits for them, cannot look for itself."""

    def __init__(self, table: Whereabouts, most_seconds: float, kill: Callable[[], None]) -> None:
        self.waiting = False
        self._table = table
        # Later than the trainer itself would notice
        self._most_seconds = most_seconds + 2 * LOOK_SECONDS
        self._kill = kill
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="worker watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread: none may live while workers are forked."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        moves, idle_seconds = self._table.moves(), 0.0
        while not self._closed.wait(1.0):
            now = self._table.moves()
            idle_seconds = idle_seconds + 1.0 if self.waiting and now == moves else 0.0
            moves = now
            if idle_seconds >= self._most_seconds:
                self._kill()
                return


def ended_worker(error: BaseException, workers: int) -> FasttrainError | None:
    """The error of a worker that was killed, as the user's sentence; None for any other error.

    torch's SIGCHLD handler raises it wherever the trainer is just then, more often in a step than while it waits for a batch.
    """
    if not isinstance(error, RuntimeError) or _ENDED.match(str(error)) is None:
        return None
    for watch in list(_watches):
        if (known := watch.death()) is not None:
            return known
    return MachineError(
        f"a data loader worker ended: {' '.join(str(error).split())}; if memory is short, lower data.workers "
        f"(now {workers}) or data.prefetch_factor"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
