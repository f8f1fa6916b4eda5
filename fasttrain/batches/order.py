"""Owns which case stands at which place of the endless stream of samples.

Positions count patches from the start of a run. Every `case_count × samples_per_case` of them are one pass over the cases in
an order of that pass's own. Batches cut the stream in pieces; how large the pieces are, how many workers make them and where
a run was interrupted changes nothing in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from fasttrain.machine.place import Place


class Order:
    """The stream over `case_count` cases, each giving `samples_per_case` samples a pass."""

    def __init__(self, case_count: int, samples_per_case: int, seed: int) -> None:
        self.case_count = case_count
        self.samples_per_case = samples_per_case
        self.seed = seed

    @property
    def pass_length(self) -> int:
        """Samples in one pass over the cases."""
        return self.case_count * self.samples_per_case

    def cases_at(self, positions: np.ndarray) -> np.ndarray:
        """The indices [n] int64 of the cases that give the samples at `positions` [n] int64."""
        numbers, places = np.divmod(positions, self.pass_length)
        cases = np.empty(len(positions), dtype=np.int64)
        for number in set(numbers.tolist()):
            chosen = numbers == number
            shuffled = _shuffled(self.case_count, self.seed, (number,))
            cases[chosen] = shuffled[places[chosen] // self.samples_per_case]
        return cases

    def turns_at(self, positions: np.ndarray) -> np.ndarray:
        """For each of `positions` [n] how many samples its case gave before, int64 [n]."""
        numbers, places = np.divmod(positions, self.pass_length)
        turns: np.ndarray = numbers * self.samples_per_case + places % self.samples_per_case
        return turns


class WindowOrder(Order):
    """The stream where each epoch sees some of the cases only: `window` gives their indices for an epoch from 0.

    Within an epoch of `samples_per_epoch` samples the window is passed over as the whole set is elsewhere. Of several `ranks`, to
    which the stream is dealt by `batch_size` samples, each passes over a window of its own by the samples that are its own.
    """

    def __init__(
        self,
        window: Callable[[int], tuple[int, ...]],
        samples_per_case: int,
        seed: int,
        samples_per_epoch: int,
        ranks: int = 1,
        batch_size: int = 1,
    ) -> None:
        super().__init__(len(window(0)), samples_per_case, seed)
        self.window = window
        self.samples_per_epoch = samples_per_epoch
        self._ranks, self._batch_size = ranks, batch_size

    def cases_at(self, positions: np.ndarray) -> np.ndarray:
        """The indices [n], among all cases, of those that give the samples at `positions` [n]."""
        epochs, numbers, places = self._passes(positions)
        cases = np.empty(len(positions), dtype=np.int64)
        for epoch, number in set(zip(epochs.tolist(), numbers.tolist(), strict=True)):
            chosen = (epochs == epoch) & (numbers == number)
            shuffled = _shuffled(self.case_count, self.seed, (epoch, number))
            window = np.array(self.window(epoch), dtype=np.int64)
            cases[chosen] = window[shuffled[places[chosen] // self.samples_per_case]]
        return cases

    def turns_at(self, positions: np.ndarray) -> np.ndarray:
        """As many as a case would have given that was in every window: rising, though not by one where it was not."""
        epochs, numbers, places = self._passes(positions)
        passes = -(-self.samples_per_epoch // (self.pass_length * self._ranks))
        turns: np.ndarray = (epochs * passes + numbers) * self.samples_per_case + places % self.samples_per_case
        return turns

    def _passes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each position its epoch, the pass of the epoch that its rank is in, and the place in it."""
        epochs, offsets = np.divmod(positions, self.samples_per_epoch)
        rounds, offsets = np.divmod(offsets, self._batch_size * self._ranks)
        numbers, places = np.divmod(rounds * self._batch_size + offsets % self._batch_size, self.pass_length)
        return epochs, numbers, places


def turns(first: int, batch_size: int, place: Place) -> Iterator[int]:
    """The first positions of a rank's batches: the stream from `first` on is dealt to all ranks in turn, a batch each."""
    return itertools.count(first + place.rank * batch_size, place.ranks * batch_size)


@functools.lru_cache(maxsize=8)
def _shuffled(case_count: int, seed: int, numbers: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, 0x0FA57, *numbers]).permutation(case_count)
