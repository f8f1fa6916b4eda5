"""Owns one preprocessing for all ranks of a machine: each makes its share of the cases and maps what the others made of theirs.

The machine holds one copy of a volume, in memory without a name that is given back with the last map of it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.storing import Options, Told
from fasttrain.data.handed_over import Offer, written
from fasttrain.data.outcomes import sendable, worst_of
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError
from fasttrain.machine.ranks import Ranks
from fasttrain.samples import Case, Sample

_LOOK_SECONDS = 0.05
_MOST_SECONDS_TO_END = 30.0


def can_make_together(ranks: Ranks, told: Told | None) -> bool:
    """Whether several ranks of this machine can hand records over, the same for all of them; `told` hears why not."""
    count = ranks.place.local_ranks
    why = why_apart(ranks) if count > 1 else None
    if why is not None and told is not None:
        told(
            f"each of the {count} ranks of this machine makes and keeps all volumes by itself, for they cannot hand them over "
            f"({why})",
            "warning",
        )
    return count > 1 and why is None


def why_apart(ranks: Ranks) -> str | None:
    """Why the ranks of this machine cannot hand records over; None where they can."""
    memory, offer, why = -1, None, None
    try:
        memory = written({"from": torch.tensor(ranks.place.local_rank)})
        offer = Offer.of(memory)
    except (OSError, AttributeError) as error:
        why = str(error)
    offers = ranks.gather_on_host(offer)
    try:
        for rank, one in enumerate(offers):
            if one is None or int(one.taken()["from"]) != rank:
                why = why or "one of them has no memory to share"
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        why = str(error)
    # By then all have looked
    told = ranks.gather_on_host(why)
    if memory >= 0:
        os.close(memory)
    return next((one for one in told if one is not None), None)


def make_together(
    cases: Sequence[Case],
    preprocess: Preprocess,
    take: Callable[[int, dict[str, Any]], None],
    workers: int,
    progress: Progress | None,
    options: Options,
) -> None:
    """Calls `take` with the index and record of every case, in an order that is the same on every rank of this machine. Called by
    all of them, where `can_make_together`; on each `workers` threads make its share.

    Cases that the first rank began ahead are its share. A record that was taken costs no descriptor. Raises one DataError with
    the faults of all cases, and any other failure of a rank's on all of them.
    """
    ranks, ahead = options.ranks, options.ahead
    begun = [ahead is not None and ahead.has_begun(case, preprocess.training) for case in cases]
    share = ranks.gather_on_host(_shares(cases, ranks.place.local_ranks, begun))[0][ranks.place.local_rank]
    makers = _Makers([(index, cases[index]) for index in share], options.handing(preprocess), workers)
    faults: dict[int, tuple[str, ...]] = {}
    failure: Exception | None = None
    done = 0
    try:
        while True:
            words = ranks.gather_on_host(makers.word(failure))
            # Whoever speaks has mapped all that was offered before
            makers.release()
            _raise_failure(words, failure or makers.failure)
            if not any(one.offers or one.faults or not one.ended for one in words):
                break
            try:
                for one in words:
                    faults |= one.faults
                    for index, offer in one.offers:
                        take(index, offer.taken())
                news = sum(len(one.offers) + len(one.faults) for one in words)
                done += news
                if progress is not None and news:
                    progress(done, len(cases))
            except Exception as error:
                failure = error
    finally:
        makers.end()
    if faults:
        by_name = sorted(faults, key=lambda index: cases[index].name)
        raise DataError([fault for index in by_name for fault in faults[index]])


class MadeTogether:
    """Cases that come once, to all ranks of the machine alike, in whatever order they are made."""

    def __init__(self, cases: Sequence[Case], preprocess: Preprocess, options: Options) -> None:
        self._cases = tuple(cases)
        self._preprocess = preprocess
        self._options = options

    def __len__(self) -> int:
        return len(self._cases)

    def each(self, take: Callable[[int, Sample], None], workers: int, progress: Progress | None = None) -> None:
        """Calls `take` with the index and the sample of each; see `make_together`."""
        given = lambda index, record: take(index, self._preprocess.as_sample(record))  # noqa: E731
        make_together(self._cases, self._preprocess, given, workers, progress, self._options)


@dataclass(frozen=True)
class _Word:
    """What a rank tells the others in one turn: volumes that wait for them, faults, and whether nothing more will come."""

    offers: tuple[tuple[int, Offer], ...]
    faults: dict[int, tuple[str, ...]]
    failure: Exception | None
    ended: bool


def _raise_failure(words: Sequence[_Word], own: Exception | None) -> None:
    worst = worst_of([one.failure for one in words])
    if worst is not None:
        raise own if own is not None and type(own) is type(worst) else worst


class _Makers:
    """Threads that make cases, each of which keeps the memory of one until it is released, so that no more volumes wait than are
    made at once. `make` gives a descriptor. failure: what ended them, if anything did.
    """

    def __init__(self, todo: Sequence[tuple[int, Case]], make: Callable[[Case], int], workers: int) -> None:
        self.failure: Exception | None = None
        self._todo = list(reversed(todo))
        self._make = make
        self._left = len(self._todo)
        self._ready: dict[int, int] = {}
        self._faults: dict[int, tuple[str, ...]] = {}
        self._offered: deque[dict[int, int]] = deque()
        self._released: set[int] = set()
        self._over = False
        self._changed = threading.Condition()
        count = min(max(workers, 1), len(self._todo))
        self._threads = [threading.Thread(target=self._work, name=f"filling {n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def word(self, failure: Exception | None) -> _Word:
        """What came up since the last one, for which it waits a little."""
        with self._changed:
            if failure is None:
                self._changed.wait_for(
                    lambda: self._ready or self._faults or self.failure or not self._left, timeout=_LOOK_SECONDS
                )
            failed = failure or self.failure
            offers = tuple((index, Offer.of(memory)) for index, memory in self._ready.items())
            self._left -= len(offers) + len(self._faults)
            word = _Word(offers, self._faults, None if failed is None else sendable(failed), self._left == 0)
            self._offered.append(self._ready)
            self._ready, self._faults = {}, {}
            return word

    def release(self) -> None:
        """All have mapped what was offered before the last word."""
        with self._changed:
            while len(self._offered) > 1:
                for index, memory in self._offered.popleft().items():
                    os.close(memory)
                    self._released.add(index)
            self._changed.notify_all()

    def end(self) -> None:
        """Begins no more, waits for the cases under way (a thread in native code when the interpreter ends aborts the process),
        and closes what nobody takes any more.
        """
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_MOST_SECONDS_TO_END)
        with self._changed:
            for kept in (self._ready, *self._offered):
                for memory in kept.values():
                    os.close(memory)
            self._ready = {}
            self._offered.clear()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            index, case = task
            try:
                memory = self._make(case)
            except DataError as error:
                with self._changed:
                    self._faults[index] = error.faults
                    self._changed.notify_all()
                continue
            except Exception as error:
                with self._changed:
                    self.failure = self.failure or error
                    self._changed.notify_all()
                return
            with self._changed:
                if self._over:
                    os.close(memory)
                    return
                self._ready[index] = memory
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._over or index in self._released)  # noqa: B023

    def _next(self) -> tuple[int, Case] | None:
        with self._changed:
            ended = self._over or self.failure is not None or not threading.main_thread().is_alive()
            return None if ended or not self._todo else self._todo.pop()


def _shares(cases: Sequence[Case], ranks: int, begun: Sequence[bool]) -> list[list[int]]:
    """The indices of the cases that each rank makes, in rising order: what is begun is the first's, of the rest each has about as
    many bytes of files.
    """
    sizes = [sum(_size(path) for path in (*case.images, case.label) if path is not None) for case in cases]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    dealt[0] = [index for index in range(len(cases)) if begun[index]]
    loads = [(0, 0, rank) for rank in range(ranks)]
    left = [index for index in range(len(cases)) if not begun[index]]
    for index in sorted(left, key=lambda index: (-sizes[index], index)):
        load, count, rank = min(loads)
        loads[rank] = load + sizes[index], count + 1, rank
        dealt[rank].append(index)
    return [sorted(share) for share in dealt]


def _size(path: Path) -> int:
    """0 of a file that is not there: whoever makes the case tells of it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
