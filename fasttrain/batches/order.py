"""Owns which case stands at which place of the endless stream of samples, and the seed of each place.

Positions count patches from the start of a run. Every `case_count × samples_per_case` of them are one pass over the cases in
an order of that pass's own. Batches cut the stream in pieces; how large the pieces are, how many workers make them and where
a run was interrupted changes nothing in it.
"""

from __future__ import annotations

import functools
import hashlib

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
        return int(_shuffled(self.case_count, self.seed, number)[place // self.samples_per_case])

    def seed_at(self, position: int) -> int:
        """The seed of all random draws of the sample at `position`: 63 bits, alike in every process."""
        digest = hashlib.blake2b(f"{self.seed} sample {position}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@functools.lru_cache(maxsize=8)
def _shuffled(case_count: int, seed: int, number: int) -> np.ndarray:
    return np.random.default_rng([seed, 0x0FA57, number]).permutation(case_count)
