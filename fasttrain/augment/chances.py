"""Owns the chances of samples: random numbers that are functions of seed, position and name, and of no state.

Whole batches are drawn at once, and yet a sample's numbers do not depend on which others are drawn with it, nor on the process.
They come from SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014): each position has
a stream of its own, whose numbers are had by their index.
"""

from __future__ import annotations

import copy
import functools
import hashlib

import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_UNUSED_BITS = np.uint64(64 - 24)
_FLOAT_STEP = np.float32(2.0**-24)


class Chances:
    """The random numbers of the samples at `positions` [n], int64, of the run with `seed`."""

    def __init__(self, seed: int, positions: Tensor | np.ndarray) -> None:
        counters = np.asarray(positions).astype(np.uint64)
        counters *= _STEP
        counters += _key(f"run {seed}")
        self._streams = _finalised(counters)[:, None]
        self._ready: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __getitem__(self, rows: slice | np.ndarray) -> Chances:
        """Those of some of the samples."""
        part = copy.copy(self)
        part._streams, part._ready = self._streams[rows], {}
        return part

    def __call__(self, name: str, count: int) -> Tensor:
        """[n, count] float32, evenly from 0 up to and without 1; the first of them are the same whatever `count` is."""
        return torch.from_numpy(self.numbers(name, count))

    def numbers(self, name: str, count: int) -> np.ndarray:
        """The same in numpy, whose operations on so few numbers take less time to start."""
        ready = self._ready.get(name)
        if ready is not None and ready.shape[1] >= count:
            return ready[:, :count]
        return _numbers(self._streams, _places(f"chance {name}", count))

    def make_ready(self, asked: tuple[tuple[str, int], ...]) -> None:
        """Computes the numbers of many names, and so many of each, at once; for small counts that is several times faster."""
        if not asked:
            return
        places, columns = _places_of_many(asked)
        values = _numbers(self._streams, places)
        self._ready = {name: values[:, where] for name, where in columns}

    def seeds(self, name: str) -> Tensor:
        """[n] int64 of 62 bits, for generators of whole fields; unrelated to the chances of that name."""
        bits = _finalised(self._streams + _places(f"seed {name}", 1))[:, 0]
        return torch.from_numpy((bits >> np.uint64(2)).astype(np.int64))


def _numbers(streams: np.ndarray, places: np.ndarray) -> np.ndarray:
    bits = _finalised(streams + places)
    bits >>= _UNUSED_BITS
    values = bits.astype(np.float32)
    values *= _FLOAT_STEP
    return values


def _finalised(state: np.ndarray) -> np.ndarray:
    """SplitMix64's way from a counter to its number (Stafford's mix 13), in place."""
    first, second, third = _SHIFTS
    state ^= state >> first
    state *= _FACTORS[0]
    state ^= state >> second
    state *= _FACTORS[1]
    state ^= state >> third
    return state


@functools.lru_cache(maxsize=64)
def _places(name: str, count: int) -> np.ndarray:
    """Where the numbers of this name stand in every position's stream, so far apart that those of two names never meet."""
    return np.arange(1, count + 1, dtype=np.uint64) * _STEP + _key(name)


@functools.lru_cache(maxsize=16)
def _places_of_many(asked: tuple[tuple[str, int], ...]) -> tuple[np.ndarray, list[tuple[str, slice]]]:
    ends = np.cumsum([count for _, count in asked]).tolist()
    columns = [(name, slice(end - count, end)) for (name, count), end in zip(asked, ends, strict=True)]
    return np.concatenate([_places(f"chance {name}", count) for name, count in asked]), columns


@functools.lru_cache(maxsize=256)
def _key(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
