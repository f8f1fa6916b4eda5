"""Owns the workers of a search as its own process sees them: started, spoken to, ended, and what became of those that died."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from fasttrain.errors import MachineError, StorageError
from fasttrain.machine.limits import oom_kills
from fasttrain.own_process import end_own, start_own
from fasttrain.studies.search.lines import Lines

_START_SECONDS = 300.0
_CONNECT_SECONDS = 60.0
_PREFIX = "fasttrain-search-"
_BEGUN_SECONDS = 60.0
"""For which a folder may be about to be locked."""


class Worker:
    """One forked process; `lines` speak to it."""

    def __init__(self, lines: Lines, process: int, kills: int | None) -> None:
        self.lines = lines
        self.process = process
        self._kills = kills

    def kill(self) -> None:
        """Ends it and what it started."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self.process, signal.SIGKILL)

    def killed_by_memory(self) -> bool:
        """Whether this machine has ended processes for memory since the worker began."""
        return self._kills is not None and (oom_kills() or 0) > self._kills


class Pool:
    """Starts the server at once; `worker` waits until it has loaded. Threads may ask at the same time."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
            self._log = open(logs / f"server-{os.getpid()}.log", "wb")  # noqa: SIM115 - lives as long as the process
        except OSError as error:
            raise StorageError(f"{logs} cannot be written: {error.strerror}; choose another --folder") from error
        remove_left()
        # Short, since a socket's path may have some hundred characters
        self._place = tempfile.mkdtemp(prefix=_PREFIX)
        self._held = _locked(self._place)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(os.path.join(self._place, "s"))
        self._listening.listen(16)
        self._server = start_own("fasttrain.studies.search.server", stderr=self._log)
        self._asking = threading.Lock()
        self._ready = False
        self._left = b""
        self._ended: dict[int, int] = {}
        self._number = 0

    def worker(self) -> Worker:
        """A new one; raises MachineError where none can be started."""
        with self._asking:
            began = time.monotonic()
            while not self._ready:
                self._hear(0.1)
                if time.monotonic() - began > _START_SECONDS:
                    raise self._gone()
            self._number += 1
            log = self.logs / f"worker-{os.getpid()}-{self._number}.log"
            request = {"worker": self._number, "socket": os.path.join(self._place, "s"), "log": str(log)}
            assert self._server.stdin is not None
            kills = oom_kills()
            try:
                self._server.stdin.write(json.dumps(request).encode() + b"\n")
                self._server.stdin.flush()
                self._listening.settimeout(_CONNECT_SECONDS)
                connection, _ = self._listening.accept()
            except OSError as error:
                raise self._gone() from error
            connection.setblocking(True)
            lines = Lines(connection)
            told = lines.next(_CONNECT_SECONDS)
            if told is None:
                raise self._gone()
            return Worker(lines, int(told["process"]), kills)

    def status_of(self, worker: Worker) -> int | None:
        """How a worker that has gone ended, as subprocess puts it; None where nobody knows."""
        give_up = time.monotonic() + 5.0
        while worker.process not in self._ended and time.monotonic() < give_up:
            with self._asking:
                self._hear(0.1)
        return self._ended.get(worker.process)

    def close(self) -> None:
        """Ends the server and all workers."""
        end_own(self._server)
        self._listening.close()
        self._log.close()
        shutil.rmtree(self._place, ignore_errors=True)
        self._held.close()

    def _hear(self, seconds: float) -> None:
        """Takes what the server says within so many seconds."""
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], seconds)[0]:
            if self._server.poll() is not None:
                raise self._gone()
            return
        piece = os.read(self._server.stdout.fileno(), 65536)
        if not piece:
            raise self._gone()
        *lines, self._left = (self._left + piece).split(b"\n")
        for line in lines:
            record = json.loads(line)
            self._ready |= "ready" in record
            if "ended" in record:
                self._ended[int(record["ended"])] = int(record["status"])

    def _gone(self) -> MachineError:
        return MachineError(f"the process that trials are started from has ended; {self.logs} may say why")


def _locked(place: str) -> IO[bytes]:
    """A file in the socket's folder, locked until this process ends however it ends."""
    held = open(os.path.join(place, "lock"), "wb")  # noqa: SIM115 - held until the end
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def remove_left() -> None:
    """The folders of sockets that searches left which were killed."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid != os.getuid() or time.time() - place.stat().st_mtime < _BEGUN_SECONDS:
                continue
            with open(place / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
