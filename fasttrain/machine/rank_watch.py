"""Owns how a rank learns within a second that another failed or was told to stop, and within half a minute that one was lost.

All ranks are linked to the first by a line of their own (`rank_wire`), which a thread keeps alive: what the main thread waits
for may never come. A process that dies has its end of the line closed by the system; one that is frozen, or whose network is
gone, says nothing any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fasttrain.errors import FasttrainError, LostRankError, MachineError, OtherRankError
from fasttrain.machine.patience import within
from fasttrain.machine.place import Place
from fasttrain.machine.rank_wire import Wire, listen

if TYPE_CHECKING:
    from torch.distributed import Store

LOST_AFTER_SECONDS = 30.0
"""Without a word from a rank. A beat needs the interpreter, which what holds its lock may keep for seconds."""
_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.1
_STOOD_STILL_SECONDS = 5.0
_TO_CONNECT_SECONDS = 20.0
_TO_KNOW_SECONDS = 5.0
"""From a sum that broke off until the line says who is gone."""
_TO_NOTICE_SECONDS = 2.0
_TO_END_SECONDS = 10.0
_ADDRESS_KEY = "fasttrain/watch"
_OF_OTHERS = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused)|tcpstore", re.IGNORECASE
)


class _Peer:
    """The other end of a wire: of the first rank each other, of another the first. `leaves`: its end was announced; `process`:
    its id, where it was told.
    """

    def __init__(self, wire: Wire, rank: int = -1, host: str = "") -> None:
        self.wire = wire
        self.rank = rank
        self.host = host
        self.process = 0
        self.heard_at = time.monotonic()
        self.leaves = False


class RankWatch:
    """The watch of one rank; its thread ends with the process, or by `close`.

    on_failure: called from a thread once another rank failed or was lost and the main thread has not ended the command within two
    seconds; afterwards the process is ended with the failure's exit code. Without it the failure is only kept.

    Raises MachineError where the first rank cannot be reached.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        on_failure: Callable[[FasttrainError], None] | None = None,
        lost_after_seconds: float = LOST_AFTER_SECONDS,
    ) -> None:
        self.place = place
        self.failure: FasttrainError | None = None
        """What ended another rank; the first stands."""
        self.over_code: int | None = None
        """With which the first rank ends the command."""
        self.at_last: Callable[[int], None] = lambda code: None
        """Called with the exit code before the watch ends the process."""
        self.first_ended = threading.Event()
        """That the first rank's process is gone."""
        self._on_failure = on_failure
        self._lost_after = lost_after_seconds
        self._lock = threading.Lock()
        self._main_ends, self._known, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._ends: list[Callable[[FasttrainError], object]] = []
        self._stop: Any = None
        self._on_stop: Callable[[int], None] = lambda code: None
        self._stop_told = False
        self._stop_heard: tuple[str, int] | None = None
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        self._token = ""
        self._door: socket.socket | None = None
        if place.leads:
            self._open(store)
        else:
            self._connect(store)
        self._began = self._beat_at = self._ticked_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    # What the command says

    def heed(self, stop: Any, on_stop: Callable[[int], None] = lambda code: None) -> None:
        """From now on what asks `stop` (a StopRequest) asks all ranks; on_stop hears the code where another was asked."""
        self._stop_told, self._on_stop, self._stop = False, on_stop, stop
        if self._stop_heard is not None:
            self._ask(*self._stop_heard)

    def failed(self, faults: tuple[str, ...], code: int) -> bool:
        """This rank, which is not the first, fails. Whether the first one, which is waited for, has told the user of it."""
        self._main_ends.set()
        peer = self._peers.get(0)
        if self.failure is None and peer is not None:
            peer.wire.say({"failed": [fault[:2000] for fault in faults[:20]], "code": code})
        if self.first_ended.is_set() or peer is None:
            return self.over_code is not None
        self._answered.wait(self._lost_after + _TO_END_SECONDS)
        return self.over_code is not None

    def gone(self, code: int) -> None:
        """This process ends at once, told to from outside."""
        self._say_all({"over": code} if self.place.leads else {"gone": code})

    def over(self, code: int) -> None:
        """The first rank has ended the command, and the others end with it; what it still does they wait for."""
        if self.place.leads and self.over_code is None:
            self.over_code = code
            self._main_ends.set()
            self._say_all({"over": code})

    def explain(self, error: BaseException) -> FasttrainError | None:
        """Who is gone, where `error` is that something sent to or from others broke off; None: it is of this rank's own."""
        if isinstance(error, FasttrainError) or not is_of_others(error):
            return None
        self._known.wait(_TO_KNOW_SECONDS)
        self._main_ends.set()
        if self.failure is not None:
            return self.failure
        told = " ".join(str(error).split())[:200]
        return LostRankError(f"the connection between the ranks broke off: {told}")

    @contextlib.contextmanager
    def ended_by(self, end: Callable[[FasttrainError], object]) -> Iterator[None]:
        """A scope in which `end` is called before the process is ended for another rank's failure: a run's own last words.

        Raises the failure that is known already.
        """
        if self.failure is not None:
            raise self.failure
        self._ends.append(end)
        try:
            yield
        finally:
            self._ends.pop()

    def wait_for_first(self) -> None:
        """Until the first rank's process has ended: whoever ends before it with a failure has the launcher end it too."""
        while not self.first_ended.wait(1.0) and self.failure is None and not self._closed.is_set():
            pass

    def close(self) -> None:
        """This rank needs the others no more."""
        if not self._closed.is_set():
            self._say_all({"bye": True})
            self._closed.set()
            self._thread.join(2.0)

    # Its thread

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
        wire.say(
            {"hello": self.place.rank, "token": found["token"], "host": socket.gethostname(), "process": os.getpid()}
        )
        self._peers[0] = _Peer(wire, 0, address[0])
        self._selector.register(wire, selectors.EVENT_READ, self._peers[0])

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self._closed.is_set():
                for key, _ in self._selector.select(_TICK_SECONDS):
                    if key.data is None:
                        self._let_in()
                    else:
                        self._hear(key.data)
                self._tick(time.monotonic())
        for peer in (*self._peers.values(), *self._strangers):
            peer.wire.close()
        if self._door is not None:
            self._door.close()
        self._selector.close()

    def _let_in(self) -> None:
        assert self._door is not None
        with contextlib.suppress(OSError):
            peer = _Peer(Wire(self._door.accept()[0]))
            self._strangers.append(peer)
            self._selector.register(peer.wire, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        messages = peer.wire.hear()
        if messages is None:
            self._drop(peer)
            return
        peer.heard_at = time.monotonic()
        for message in messages:
            if peer in self._strangers:
                self._greet(peer, message)
            else:
                self._take(peer, message)

    def _greet(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank, token = message.get("hello"), str(message.get("token", ""))
        if (
            not secrets.compare_digest(token, self._token)
            or not isinstance(rank, int)
            or not 0 < rank < self.place.ranks
        ):
            self._drop(peer)
            return
        self._strangers.remove(peer)
        peer.rank, peer.host, peer.process = rank, str(message.get("host", "?")), int(message.get("process", 0))
        self._peers[rank] = peer
        peer.wire.say({"host": socket.gethostname(), "process": os.getpid()})

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "stop" in message:
            self._stop_heard = str(message["stop"]), int(message["code"])
            if self._stop is not None:
                self._ask(*self._stop_heard)
        elif "failed" in message:
            faults = [str(fault) for fault in message["failed"]]
            if self.place.leads:
                faults = [fault if fault.startswith("rank ") else f"{_named(peer)}: {fault}" for fault in faults]
            self._fail(OtherRankError(faults, int(message["code"])))
        elif "gone" in message:
            peer.leaves = True
            self._fail(OtherRankError(f"{_named(peer)} was told to end at once", int(message["gone"])))
        elif "over" in message:
            peer.leaves = True
            self.over_code = int(message["over"])
            self._answered.set()
            if self._on_failure is not None:
                threading.Thread(target=self._end_with_first, name="ranks-end", daemon=True).start()
        elif "bye" in message:
            peer.leaves = True
        elif "host" in message:
            peer.host, peer.process = str(message["host"]), int(message["process"])

    def _ask(self, reason: str, code: int) -> None:
        self._stop.ask(reason, code)
        self._on_stop(code)

    def _drop(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire)
        peer.wire.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
            return
        self._peers.pop(peer.rank, None)
        if not self.place.leads:
            self.first_ended.set()
        if not peer.leaves:
            self._fail(
                LostRankError(
                    f"{_named(peer)} ended without a word: it was killed (as the system does where memory runs out)"
                )
            )
        self._answered.set()

    def _tick(self, now: float) -> None:
        if now - self._ticked_at > _STOOD_STILL_SECONDS:
            # All may have been frozen together
            self._began += now - self._ticked_at
            for peer in self._peers.values():
                peer.heard_at = now
        self._ticked_at = now
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = now
            self._say_all({"beat": 1})
        for peer in [peer for peer in self._peers.values() if now - peer.heard_at > self._lost_after]:
            peer.leaves = True
            lost = LostRankError(self._told_of_silence(peer))
            lost.silent = True
            self._fail(lost)
            _put_out(peer.process)
            self._drop(peer)
        if self._door is not None and self.over_code is None and now - self._began > self._lost_after:
            self._miss()
        stop = self._stop
        if stop is not None and stop.asked and not self._stop_told:
            self._stop_told = True
            self._say_all({"stop": stop.reason, "code": stop.exit_code})

    def _miss(self) -> None:
        """Whoever met and then never opened its line; looked at once."""
        self._began = float("inf")
        if missing := [rank for rank in range(1, self.place.ranks) if rank not in self._peers]:
            named = ", ".join(map(str, missing[:8]))
            self._fail(LostRankError(f"rank {named} of {self.place.ranks} met the others and was not heard of again"))

    def _told_of_silence(self, peer: _Peer) -> str:
        return (
            f"{_named(peer)} has not been heard of for {self._lost_after:.0f} s: its process is frozen, its machine gone, or the "
            "network between them cut"
        )

    def _say_all(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):
            peer.wire.say(message)

    # The end

    def _fail(self, error: FasttrainError) -> None:
        with self._lock:
            if self.failure is not None or self.over_code is not None:
                return
            self.failure = error
        self._known.set()
        if self.place.leads:
            self._say_all({"failed": list(error.faults), "code": error.exit_code})
        if self._on_failure is not None:
            threading.Thread(target=self._end_process, name="ranks-failure", daemon=True).start()

    def _end_process(self) -> None:
        """Unless the main thread does, which may wait for ever for what never comes."""
        failure, heard = self.failure, self._on_failure
        assert failure is not None
        assert heard is not None
        if not self.place.leads and not isinstance(failure, LostRankError):
            # The first rank is there, and ends the command
            self._answered.wait(self._lost_after + _TO_END_SECONDS)
            if self.over_code is not None:
                return
        if not self._main_ends.wait(_TO_NOTICE_SECONDS):
            with contextlib.suppress(Exception):
                within(_TO_END_SECONDS, lambda: self._last_words(failure))
            with contextlib.suppress(Exception):
                within(_TO_END_SECONDS, lambda: heard(failure))
        elif self._is_over(_TO_END_SECONDS):
            # All that is left to do is the user's own command
            return
        self.over(failure.exit_code)
        self._exit(failure.exit_code)

    def _last_words(self, failure: FasttrainError) -> None:
        for end in reversed(self._ends):
            end(failure)

    def _is_over(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.over_code is None and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)
        return self.over_code is not None

    def _end_with_first(self) -> None:
        """The first rank has ended the command, and this one's main thread may wait for it in the middle of a step."""
        self.wait_for_first()
        if not self.over_code:
            # It needs not be hurried: the launcher waits for all
            time.sleep(_TO_END_SECONDS)
        self._exit(self.over_code or 0)

    def _exit(self, code: int) -> None:
        with contextlib.suppress(Exception):
            self.at_last(code)
        os._exit(code)


def is_of_others(error: BaseException) -> bool:
    """Whether an error is one of torch's for what is sent between ranks: gloo has no type of its own."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError"):
        return True
    return isinstance(error, RuntimeError) and _OF_OTHERS.search(str(error)) is not None


def _put_out(process: int) -> None:
    """Kills a frozen rank that the same launcher has started, which would wait for it to end by itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        if process != os.getpid() and parent == os.getppid() and parent > 1:
            os.kill(process, signal.SIGKILL)


def _named(peer: _Peer) -> str:
    return f"rank {peer.rank} on {peer.host}"
