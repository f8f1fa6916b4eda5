"""Owns the lines between the first rank and each other one: how they are opened, kept alive, and found to be dead."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from fasttrain.errors import MachineError
from fasttrain.machine.place import Place
from fasttrain.machine.rank_wire import Wire, listen

if TYPE_CHECKING:
    from torch.distributed import Store

TICK_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_STOOD_STILL_SECONDS = 5.0
_TO_CONNECT_SECONDS = 20.0
_ADDRESS_KEY = "fasttrain/watch"


class Peer:
    """The other end of a line: of the first rank each other, of another the first. `leaves`: its end was announced; `process`:
    its id, where it was told.
    """

    def __init__(self, wire: Wire, rank: int = -1, host: str = "") -> None:
        self.wire = wire
        self.rank = rank
        self.host = host
        self.process = 0
        self.heard_at = time.monotonic()
        self.leaves = False

    @property
    def named(self) -> str:
        """As sentences have it."""
        return f"rank {self.rank} on {self.host}"


class Listener(Protocol):
    """Who is told what comes, in the thread of the lines."""

    def take(self, peer: Peer, message: dict[str, Any]) -> None:
        """A rank says something."""
        ...

    def lose(self, peer: Peer, silent: bool) -> None:
        """A rank's end was closed, or it is `silent` for too long; `peer.leaves` where that was to be expected."""
        ...

    def miss(self, ranks: list[int]) -> None:
        """Ranks that were met never opened their line."""
        ...

    def tick(self) -> None:
        """Ten times a second."""
        ...


class Links:
    """The lines of one rank, looked after by a thread until `close`. Raises MachineError where the first cannot be reached."""

    def __init__(self, place: Place, store: Store, lost_after_seconds: float, listener: Listener) -> None:
        self.place = place
        self.peers: dict[int, Peer] = {}
        self.lost_after = lost_after_seconds
        self._listener = listener
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._strangers: list[Peer] = []
        self._token = ""
        self._door: socket.socket | None = None
        if place.leads:
            self._open(store)
        else:
            self._connect(store)
        self._began = self._beat_at = self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether this rank needs the others no more."""
        return self._closed.is_set()

    def say_all(self, message: dict[str, Any]) -> None:
        """To every rank that has a line to this one."""
        for peer in list(self.peers.values()):
            peer.wire.say(message)

    def close(self) -> None:
        """Says goodbye and ends the thread."""
        if not self._closed.is_set():
            self.say_all({"bye": True})
            self._closed.set()
            self._thread.join(2.0)

    def look(self, now: float) -> None:
        """Gives a sign of life, and looks for who gives none. now: seconds of the monotonic clock."""
        if now - self._looked_at > _STOOD_STILL_SECONDS:
            # All may have been frozen together
            self._began += now - self._looked_at
            for peer in self.peers.values():
                peer.heard_at = now
        self._looked_at = now
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = now
            self.say_all({"beat": 1})
        for peer in [peer for peer in self.peers.values() if now - peer.heard_at > self.lost_after]:
            self._listener.lose(peer, silent=True)
            peer.leaves = True
            _put_out(peer.process)
            self._drop(peer)
        if self._door is not None and now - self._began > self.lost_after:
            # Once
            self._began = float("inf")
            if missing := [rank for rank in range(1, self.place.ranks) if rank not in self.peers]:
                self._listener.miss(missing)

    def _open(self, store: Store) -> None:
        self._door = listen()
        self._door.setblocking(False)
        self._token = secrets.token_hex(16)
        self._selector.register(self._door, selectors.EVENT_READ, None)
        store.set(_ADDRESS_KEY, json.dumps({"port": self._door.getsockname()[1], "token": self._token}))

    def _connect(self, store: Store) -> None:
        found = json.loads(store.get(_ADDRESS_KEY))
        address = (os.environ.get("MASTER_ADDR", "localhost"), int(found["port"]))
        try:
            wire = Wire(socket.create_connection(address, timeout=_TO_CONNECT_SECONDS))
        except OSError as error:
            raise MachineError(
                f"rank {self.place.rank} on {socket.gethostname()} cannot reach rank 0 at {address[0]}:{address[1]} "
                f"({error.strerror or error}); the machines must let each other in at every port"
            ) from error
        wire.say({"hello": self.place.rank, "token": found["token"], **_self()})
        self.peers[0] = Peer(wire, 0, address[0])
        self._selector.register(wire, selectors.EVENT_READ, self.peers[0])

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                for key, _ in self._selector.select(TICK_SECONDS):
                    if key.data is None:
                        self._let_in()
                    else:
                        self._hear(key.data)
                self.look(time.monotonic())
                self._listener.tick()
            except (OSError, ValueError, KeyError, TypeError):
                # A line that broke while it was looked at; what it means shows at the next look
                time.sleep(TICK_SECONDS)
        for peer in (*self.peers.values(), *self._strangers):
            peer.wire.close()
        if self._door is not None:
            self._door.close()
        self._selector.close()

    def _let_in(self) -> None:
        assert self._door is not None
        with contextlib.suppress(OSError):
            peer = Peer(Wire(self._door.accept()[0]))
            self._strangers.append(peer)
            self._selector.register(peer.wire, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer) -> None:
        messages = peer.wire.hear()
        if messages is None:
            self._drop(peer)
            return
        peer.heard_at = time.monotonic()
        for message in messages:
            if peer in self._strangers:
                self._greet(peer, message)
            elif "host" in message:
                peer.host, peer.process = str(message["host"]), int(message["process"])
            else:
                self._listener.take(peer, message)

    def _greet(self, peer: Peer, message: dict[str, Any]) -> None:
        rank, token = message.get("hello"), str(message.get("token", "")).encode()
        known = secrets.compare_digest(token, self._token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self.place.ranks:
            self._drop(peer)
            return
        self._strangers.remove(peer)
        peer.rank, peer.host, peer.process = rank, str(message.get("host", "?")), int(message.get("process", 0))
        self.peers[rank] = peer
        peer.wire.say(_self())

    def _drop(self, peer: Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire)
        peer.wire.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
        elif self.peers.pop(peer.rank, None) is not None:
            self._listener.lose(peer, silent=False)


def _self() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def _put_out(process: int) -> None:
    """Kills a frozen rank that the same launcher has started, which would wait for it to end by itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        if process != os.getpid() and parent == os.getppid() and parent > 1:
            os.kill(process, signal.SIGKILL)
