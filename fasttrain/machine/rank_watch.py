"""Owns how a rank learns within a second that another failed or was told to stop, and within half a minute that one was lost.

All ranks are linked to the first by a line of their own (`rank_wire`), which a thread keeps alive: what the main thread waits
for may never come. A process that dies has its end of the line closed by the system; one that is frozen, or whose network is
gone, says nothing any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fasttrain.errors import FasttrainError, LostRankError, OtherRankError
from fasttrain.machine.patience import within
from fasttrain.machine.place import Place
from fasttrain.machine.rank_links import TICK_SECONDS, Links, Peer

if TYPE_CHECKING:
    from torch.distributed import Store

LOST_AFTER_SECONDS = 30.0
"""Without a word from a rank. A beat needs the interpreter, which what holds its lock may keep for seconds."""
_TO_KNOW_SECONDS = 5.0
"""From a sum that broke off until the line says who is gone."""
_TO_NOTICE_SECONDS = 2.0
_TO_END_SECONDS = 10.0
_OF_OTHERS = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused)|tcpstore", re.IGNORECASE
)


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
        self._lock = threading.Lock()
        self._main_ends, self._known, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._ends: list[Callable[[FasttrainError], object]] = []
        self._stop: Any = None
        self._on_stop: Callable[[int], None] = lambda code: None
        self._stop_told = False
        self._stop_heard: tuple[str, int] | None = None
        self.links = Links(place, store, lost_after_seconds, self)
        self.links.begin()

    # What the command says

    def heed(self, stop: Any, on_stop: Callable[[int], None] = lambda code: None) -> None:
        """From now on what asks `stop` (a StopRequest) asks all ranks; on_stop hears the code where another was asked."""
        self._stop_told, self._on_stop, self._stop = False, on_stop, stop
        if self._stop_heard is not None:
            self._ask(*self._stop_heard)

    def failed(self, faults: tuple[str, ...], code: int) -> bool:
        """This rank, which is not the first, fails. Whether the first one, which is waited for, has told the user of it."""
        self._main_ends.set()
        peer = self.links.peers.get(0)
        if self.failure is None and peer is not None:
            peer.wire.say({"failed": [fault[:2000] for fault in faults[:20]], "code": code})
        if self.first_ended.is_set() or peer is None:
            return self.over_code is not None
        self._answered.wait(self.links.lost_after + _TO_END_SECONDS)
        return self.over_code is not None

    def gone(self, code: int) -> None:
        """This process ends at once, told to from outside."""
        self.links.say_all({"over": code} if self.place.leads else {"gone": code})

    def over(self, code: int) -> None:
        """The first rank has ended the command, and the others end with it; what it still does they wait for."""
        if self.place.leads and self.over_code is None:
            self.over_code = code
            self._main_ends.set()
            self.links.say_all({"over": code})

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
        while not self.first_ended.wait(1.0) and self.failure is None and not self.links.closed:
            pass

    def close(self) -> None:
        """This rank needs the others no more."""
        self.links.close()

    # What the lines tell

    def take(self, peer: Peer, message: dict[str, Any]) -> None:
        """As `Listener` has it, as are those that follow."""
        if "stop" in message:
            self._stop_heard = str(message["stop"]), int(message["code"])
            if self._stop is not None:
                self._ask(*self._stop_heard)
        elif "failed" in message:
            faults = [str(fault) for fault in message["failed"]]
            if self.place.leads:
                faults = [fault if fault.startswith("rank ") else f"{peer.named}: {fault}" for fault in faults]
            self._fail(OtherRankError(faults, int(message["code"])))
        elif "gone" in message:
            peer.leaves = True
            self._fail(OtherRankError(f"{peer.named} was told to end at once", int(message["gone"])))
        elif "over" in message:
            peer.leaves = True
            self.over_code = int(message["over"])
            self._answered.set()
            if self._on_failure is not None:
                threading.Thread(target=self._end_with_first, name="ranks-end", daemon=True).start()
        elif "bye" in message:
            peer.leaves = True

    def lose(self, peer: Peer, silent: bool) -> None:
        """By the line that broke, or by silence."""
        if not self.place.leads:
            self.first_ended.set()
        if silent:
            lost = LostRankError(
                f"{peer.named} has not been heard of for {self.links.lost_after:.0f} s: its process is frozen, its machine gone, "
                "or the network between them cut"
            )
            lost.silent = True
            self._fail(lost)
        elif not peer.leaves:
            why = "it was killed (as the system does where memory runs out), or crashed"
            self._fail(LostRankError(f"{peer.named} ended without a word: {why}"))
        self._answered.set()

    def miss(self, ranks: list[int]) -> None:
        """They met the others, and no more is known of them."""
        named = ", ".join(map(str, ranks[:8]))
        self._fail(LostRankError(f"rank {named} of {self.place.ranks} met the others and was not heard of again"))

    def tick(self) -> None:
        """A stop that this rank was asked for is told to all."""
        stop = self._stop
        if stop is not None and stop.asked and not self._stop_told:
            self._stop_told = True
            self.links.say_all({"stop": stop.reason, "code": stop.exit_code})

    def _ask(self, reason: str, code: int) -> None:
        self._stop.ask(reason, code)
        self._on_stop(code)

    # The end

    def _fail(self, error: FasttrainError) -> None:
        with self._lock:
            if self.failure is not None or self.over_code is not None:
                return
            self.failure = error
        self._known.set()
        if self.place.leads:
            self.links.say_all({"failed": list(error.faults), "code": error.exit_code})
        if self._on_failure is not None:
            threading.Thread(target=self._end_process, name="ranks-failure", daemon=True).start()

    def _end_process(self) -> None:
        """Unless the main thread does, which may wait for ever for what never comes."""
        failure, heard = self.failure, self._on_failure
        assert failure is not None
        assert heard is not None
        if not self.place.leads and not isinstance(failure, LostRankError):
            # The first rank is there, and ends the command
            self._answered.wait(self.links.lost_after + _TO_END_SECONDS)
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
            time.sleep(TICK_SECONDS)
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
