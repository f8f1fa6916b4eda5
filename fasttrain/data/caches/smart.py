"""Owns the source that keeps a moving window of the cases in memory (the scheme of MONAI's SmartCacheDataset).

Window and replacement are MONAI's to the item (a test runs its class beside this one). The class itself cannot serve: its window
counts calls since `start()`, so that a resume would begin with the first cases again; its replacement thread dies of a file that
cannot be read, and `update_cache` then waits for ever; and the thread runs while loader workers are forked. Here the window is
a function of the epoch, faults come out of `open_epoch`, and no thread is alive between `open_epoch` and `prepare_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fasttrain.data.caches.background import Loading
from fasttrain.data.caches.filling import Progress
from fasttrain.data.caches.storing import Options, Sizes, gather
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.place import ALONE, Place
from fasttrain.recipe.data_spec import DEFAULT_SHARE, CacheSpec
from fasttrain.samples import Case, Sample
from fasttrain.wording import counted

_BACKGROUND_SHARE = 4
"""One of so many threads loads beside the training."""


class Window:
    """Which of `case_count` cases an epoch trains on: `held` of them, of which each epoch replaces the first `replaced`.

    Several ranks part the cases, and each has a window over its own (MONAI's way, by `partition_dataset`); there must be a case
    for each. `cache_cases` is the number that they hold together.
    """

    def __init__(self, spec: CacheSpec, case_count: int, place: Place = ALONE) -> None:
        ring = list(range(case_count))
        if spec.shuffle_seed is not None:
            # MONAI's shuffle, to the item
            np.random.RandomState(spec.shuffle_seed).shuffle(ring)
        self._ring = place.share_of(ring)
        own, share = len(self._ring), DEFAULT_SHARE if spec.cache_share is None else spec.cache_share
        wanted = max(1, int(own * share))
        if spec.cache_cases is not None:
            wanted = max(1, len(place.share_of(range(spec.cache_cases))))
        self.held = min(wanted, own)
        self.replaced = min(math.ceil(self.held * spec.replace_rate), own - self.held)

    @classmethod
    def of_all(cls, spec: CacheSpec, case_count: int, ranks: int) -> list[Window]:
        """Those of so many ranks."""
        return [cls(spec, case_count, Place(rank, ranks)) for rank in range(ranks)]

    @property
    def case_count(self) -> int:
        """Cases through which it goes."""
        return len(self._ring)

    @property
    def most_in_memory(self) -> int:
        """Cases in memory at the end of an epoch, when its own and the next one's replacements are there."""
        return self.held + self.replaced

    def of(self, epoch: int) -> tuple[int, ...]:
        """The indices of the cases of an epoch (from 0), in MONAI's order."""
        first = epoch * self.replaced
        return tuple(self._ring[(first + place) % self.case_count] for place in range(self.held))


class SmartCache:
    """All cases by index, as under every kind; those of the open epoch's window come from memory, others are read.

    Per epoch: `open_epoch(epoch)`, fork the workers, `prepare_epoch(epoch + 1)`. A worker sees the window that was open when
    it was forked, so it must not outlive the epoch.
    """

    def __init__(self, cases: Sequence[Case], preprocess: Preprocess, window: Window, workers: int) -> None:
        self._cases = tuple(cases)
        self._preprocess = preprocess
        self._workers = max(workers, 1)
        self._held: dict[int, dict[str, Any]] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self._loading: Loading | None = None
        self.window = window

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Sample:
        case = self._cases[index]
        record = self._held.get(index % len(self))
        return self._preprocess.as_sample(self._preprocess(case) if record is None else record)

    @property
    def held(self) -> tuple[int, ...]:
        """The indices of the cases that are in memory for the open epoch."""
        return tuple(sorted(self._held))

    @property
    def sizes(self) -> Sizes:
        """Of the cases that are in memory for the open epoch."""
        sizes = Sizes()
        for record in self._held.values():
            sizes.add(record)
        return sizes

    def fill(self, epoch: int, progress: Progress | None) -> None:
        """Keeps the window of `epoch`; raises one DataError with the faults of all cases in it."""
        wanted = sorted(self.window.of(epoch))
        records = gather([self._cases[index] for index in wanted], self._preprocess, self._workers, progress)
        self._held = dict(zip(wanted, records, strict=True))

    def open_epoch(self, epoch: int) -> None:
        """Moves the window to an epoch, from whichever it was at: waits for what is being prepared, loads what is missing.

        Raises DataError with every case that could not be read.
        """
        there = self._held | self._ready | self._prepared()
        wanted = self.window.of(epoch)
        if missing := [index for index in wanted if index not in there]:
            there |= Loading(missing, self._load, self._workers).finish()
        coming = set(self.window.of(epoch + 1)).difference(wanted)
        self._held = {index: there[index] for index in wanted}
        self._ready = {index: record for index, record in there.items() if index in coming}

    def prepare_epoch(self, epoch: int) -> None:
        """Begins to load, in the background, what the window of `epoch` has and memory has not."""
        self._ready |= self._prepared()
        missing = [index for index in self.window.of(epoch) if index not in self._held and index not in self._ready]
        if missing:
            self._loading = Loading(missing, self._load, self._workers // _BACKGROUND_SHARE)

    def close(self) -> None:
        """Ends the threads, waiting for the cases they are at, and gives the volumes back."""
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None
        self._held, self._ready = {}, {}

    def _prepared(self) -> dict[int, dict[str, Any]]:
        loading, self._loading = self._loading, None
        return {} if loading is None else loading.finish()

    def _load(self, index: int) -> dict[str, Any]:
        return self._preprocess(self._cases[index])


def open_smart(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> SmartCache:
    """Keeps the window of `options.epoch`, loaded by `workers` threads; raises one DataError with the faults of its cases."""
    place = options.ranks.place
    source = SmartCache(cases, preprocess, Window(preprocess.data.cache, len(cases), place), workers)
    source.fill(options.epoch, progress)
    if options.told is not None:
        share = f" by rank {place.rank} of {place.ranks}, whose share are {source.window.case_count}"
        whose = "" if place.alone else share
        held = f"{len(source.held)} of {counted(len(cases), 'case')} in memory"
        options.told(f"smart cache: {held}{whose}, {source.sizes}", "info")
    return source
