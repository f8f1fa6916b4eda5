"""Owns fields of Gaussian noise that are functions of a seed, the channel and the voxel alone, the same on every device.

Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) numbers the voxels of a channel by fours,
and Box and Muller's transform makes each pair of its words a pair of normal numbers. Triton's kernels compute the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEYS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_AT_ONCE = 1 << 15
"""Counters, so that the words stay in a CPU's cache."""


def normal_field(seed: Tensor, channels: int, voxels: int) -> Tensor:
    """[channel, voxel] float32 of mean 0 and deviation 1, on the device of `seed`, an int64 that the host does not read."""
    groups = math.ceil(voxels / 4)
    key = seed & _MASK, seed >> 32 & _MASK
    field = torch.empty((channels * groups, 4), device=seed.device)
    for first in range(0, len(field), _AT_ONCE):
        part = field[first : first + _AT_ONCE]
        words = philox(torch.arange(first, first + len(part), device=seed.device), key)
        for pair in (0, 2):
            # The words fill 32 bits, of which a float32 keeps 24; half a step keeps the logarithm finite
            radius = words[pair].float().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
            angle = words[pair + 1].float().mul_(2.0**-32 * math.tau)
            torch.mul(radius, angle.cos(), out=part[:, pair])
            torch.mul(radius, angle.sin_(), out=part[:, pair + 1])
    return field.view(channels, 4 * groups)[:, :voxels]


def philox(counter: Tensor, key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The four words, each int64 of 32 bits, at each `counter` (int64 below 2³², the other three words of it are 0)."""
    words = [counter, *(torch.zeros_like(counter) for _ in range(3))]
    first, second = key
    for _ in range(_ROUNDS):
        one, other = words[0] * _FACTORS[0], words[2] * _FACTORS[1]
        words = [
            (other >> 32).bitwise_and_(_MASK).bitwise_xor_(words[1]).bitwise_xor_(first),
            other.bitwise_and_(_MASK),
            (one >> 32).bitwise_and_(_MASK).bitwise_xor_(words[3]).bitwise_xor_(second),
            one.bitwise_and_(_MASK),
        ]
        first, second = first + _KEYS[0] & _MASK, second + _KEYS[1] & _MASK
    return words
