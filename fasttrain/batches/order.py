"""Owns which case stands at which place of the endless stream of samples, and the seed of each place.

Positions count patches from the start of a run. Every `case_count × samples_per_case` of them are one pass over the cases in
an order of that pass's own. Batches cut the stream in pieces; how large the pieces are, how many workers make them and where
a run was interrupted changes nothing in it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np


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

    def case_at(self, position: int) -> int:
        """The index of the case that gives the sample at `position`."""
        number, place = divmod(position, self.pass_length)
        return int(_shuffled(self.case_count, self.seed, (number,))[place // self.samples_per_case])

    def seed_at(self, position: int) -> int:
        """The seed of all random draws of the sample at `position`: 63 bits, alike in every process."""
        digest = hashlib.blake2b(f"{self.seed} sample {position}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class WindowOrder(Order):
    """The stream where each epoch sees some of the cases only: `window` gives their indices for an epoch from 0.

    Within an epoch of `samples_per_epoch` samples the window is passed over as the whole set is elsewhere.
    """

    def __init__(
        self, window: Callable[[int], tuple[int, ...]], samples_per_case: int, seed: int, samples_per_epoch: int
    ) -> None:
        super().__init__(len(window(0)), samples_per_case, seed)
        self.window = window
        self.samples_per_epoch = samples_per_epoch

    def case_at(self, position: int) -> int:
        """The index, among all cases, of the one that gives the sample at `position`."""
        epoch, offset = divmod(position, self.samples_per_epoch)
        number, place = divmod(offset, self.pass_length)
        shuffled = _shuffled(self.case_count, self.seed, (epoch, number))
        return self.window(epoch)[int(shuffled[place // self.samples_per_case])]


@functools.lru_cache(maxsize=8)
def _shuffled(case_count: int, seed: int, numbers: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, 0x0FA57, *numbers]).permutation(case_count)
