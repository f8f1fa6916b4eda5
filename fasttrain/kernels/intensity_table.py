"""Owns the table that tells the kernels of intensity augmentation what was drawn: `COLUMNS` numbers a sample and channel.

Whole numbers lie in it as int32, others as the bits of a float32. A technique acts where its bit of `FLAGS` is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasttrain.kernels.intensity_columns import COLUMNS, FLAGS, IDENTITY, MAP


@dataclass(frozen=True)
class Chain:
    """Which techniques there are at all, whatever a batch draws. `shade` are shift and factors; `clips` belongs to contrast; a
    gamma is there where it is not None, and retains mean and deviation where it is True.
    """

    noise: bool = False
    blur_radius: int = 0
    shade: bool = False
    contrast: bool = False
    clips: bool = False
    low_resolution: bool = False
    gamma_inverted: bool | None = None
    gamma: bool | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """The table of a batch, in numpy, while it is filled: `ints` and `floats` [sample, channel, COLUMNS] are one memory."""

    ints: np.ndarray
    floats: np.ndarray

    @staticmethod
    def empty(samples: int, channels: int) -> Rows:
        """Of which nothing acts."""
        ints = np.zeros((samples, channels, COLUMNS), dtype=np.int32)
        floats = ints.view(np.float32)
        floats[..., MAP : MAP + len(IDENTITY)] = IDENTITY
        return Rows(ints, floats)

    def act(self, flag: int, active: np.ndarray) -> None:
        """Sets a bit where `active`, bool [sample, 1] or [sample, channel]."""
        self.ints[..., FLAGS] |= active * np.int32(flag)

    def tensor(self) -> Tensor:
        """int32 [sample, channel · COLUMNS]."""
        return torch.from_numpy(self.ints.reshape(len(self.ints), -1))


def columns(table: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """The whole numbers and the others, each [sample, channel, COLUMNS], of a table; views of it."""
    ints = table.unflatten(1, (channels, COLUMNS))
    return ints, ints.view(torch.float32)
