"""Owns whether an exported network answers as the run's own: on windows of a real case, within a stated tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fasttrain.delivery.export.plain import PlainModel, real_windows

TOLERANCE = 1e-3
"""Of logits, as a share of the largest one where that is above 1."""


def largest_difference(model: PlainModel, opened: Callable[[Tensor], Tensor]) -> float:
    """The largest difference of two answers to windows of a real case, as a share of the largest logit (at least 1).

    Windows go one by one and in batches, since a file that has the number written into it would be of no use.
    """
    windows = real_windows(model)
    with torch.no_grad():
        expected = model.network(windows)
        found = [opened(windows), torch.cat([opened(one[None]) for one in windows])]
    if any(one.shape != expected.shape for one in found):
        return float("inf")
    scale = max(float(expected.abs().max()), 1.0)
    differences = [float((one.float() - expected).abs().max()) / scale for one in found]
    return max(differences) if all(one == one for one in differences) else float("inf")
