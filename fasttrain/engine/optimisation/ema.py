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
        self._movement: torch.Tensor | None = None

    def before_step(self, step: int) -> None:
        """Tells the device how far `update` is to move after optimiser step `step` (from 0)."""
        movement = 1.0 - min(self.decay, (1 + step) / (10 + step))
        if self._movement is None:
            self._movement = torch.zeros((), device=self._own[0].device)
        self._movement.fill_(movement)

    @torch.no_grad()
    def update(self) -> None:
        """Follows the weights, as far as `before_step` said."""
        assert self._movement is not None
        away = torch._foreach_sub(self._followed, self._own)
        torch._foreach_mul_(away, self._movement)
        torch._foreach_add_(self._own, away)
        for own, followed in self._buffers:
            own.copy_(followed)
