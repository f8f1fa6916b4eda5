"""Owns which slice of its volume a patch comes from, where `data.slices` cuts volumes: all of a case's once, then all again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_STREAM = 0x511CE
"""Keeps these draws apart from those of the order of cases."""


class SliceTurns:
    """For a case's samples, numbered by their turn from 0 on, the slices that they come from.

    In a round each slice that holds a class comes once, and with them a share `keep_empty` of the others, which each round draws
    anew; so does the order. All is a function of (seed, case, turn); what is kept between calls only saves drawing a round again.
    """

    def __init__(self, seed: int, keep_empty: float) -> None:
        self._seed = seed
        self._keep_empty = keep_empty
        self._rounds: dict[int, tuple[int, np.ndarray]] = {}

    def at(self, cases: np.ndarray, turns: np.ndarray, filled: Callable[[int], np.ndarray]) -> np.ndarray:
        """The slices int64 [n] of the samples at `turns` [n] of `cases` [n]; `filled` gives bool [slice] of a row from 0."""
        found = np.empty(len(cases), dtype=np.int64)
        for row, (case, turn) in enumerate(zip(cases.tolist(), turns.tolist(), strict=True)):
            found[row] = self._slice(case, turn, filled(row))
        return found

    def _slice(self, case: int, turn: int, filled: np.ndarray) -> int:
        full = int(np.count_nonzero(filled))
        # A case without any class gives one slice at least
        kept = max(round(self._keep_empty * (len(filled) - full)), int(not full))
        number, place = divmod(turn, full + kept)
        latest = self._rounds.get(case)
        if latest is None or latest[0] != number:
            latest = self._rounds[case] = number, self._round(case, number, filled, kept)
        return int(latest[1][place])

    def _round(self, case: int, number: int, filled: np.ndarray, kept: int) -> np.ndarray:
        draws = np.random.default_rng([self._seed, _STREAM, case, number])
        empty = draws.permutation(np.flatnonzero(~filled))[:kept]
        return draws.permutation(np.concatenate([np.flatnonzero(filled), empty]))
