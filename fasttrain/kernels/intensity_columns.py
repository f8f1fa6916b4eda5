"""Owns where each number stands in the table of intensity augmentation; apart from torch, which compiling does not need."""

from __future__ import annotations

import math

NOISE, BLUR, SHADE, CONTRAST, LOW_RESOLUTION, GAMMA_INVERTED, GAMMA = (1 << bit for bit in range(7))
"""Bits of `FLAGS`; SHADE is a shift and the factors after it, which are one map."""

FLAGS, SEED, STD, SIGMA, MAP, FACTOR, COARSE, POWER_INVERTED, POWER = 0, 1, 3, 4, 7, 12, 13, 16, 17
"""First columns. SEED: 2, the low half first; SIGMA: 3 axes; MAP: the 5 of `IDENTITY`; COARSE: voxels along 3 axes."""
COLUMNS = 18

SETTLED = 11
"""Numbers a channel that kernels hand on: a map, a curve's low end, range, power and sign, mean and deviation before it."""

IDENTITY = (0.0, 1.0, 0.0, -math.inf, math.inf)
"""A map: centre, factor, offset, low, high; v becomes (v − centre) · factor + offset, clipped to low…high."""
