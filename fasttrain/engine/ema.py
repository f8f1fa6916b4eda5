"""Owns the moving average of the weights, kept as a network of its own that validation and predictions use."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """Follows a network on its device, in one fused pass over all weights; `network` is the average.

    After step t (from 0) the average moves by 1 − min(decay, (1 + t) / (10 + t)), TensorFlow's ExponentialMovingAverage with
    `num_updates`. Running statistics of normalisation layers are copied: they are averages already.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.network = copy.deepcopy(network).requires_grad_(False)
        self._own: list[torch.Tensor] = list(self.network.parameters())
        self._followed = [parameter.detach() for parameter in network.parameters()]
        self._buffers = list(zip(self.network.buffers(), network.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follows the weights after optimiser step `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._own, self._followed, 1.0 - decay)
        for own, followed in self._buffers:
            own.copy_(followed)
