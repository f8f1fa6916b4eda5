"""Owns what networks answer to a batch of windows: probabilities, averaged over flips and networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""A network in eval mode: [batch, channel, *patch] → logits [batch, class, *patch]."""


class Answer:
    """Softmax probabilities [batch, class, *patch] float32 of windows [batch, channel, *patch].

    The mean over all 2^n combinations of the flips of the spatial axes `mirror`, and over `forwards`, several networks that
    answer as one. A network sees at most `batch_size` patches at a time, and as many flips of few windows in one pass as there
    is room for.
    """

    def __init__(self, forwards: Sequence[Forward], mirror: Sequence[int], batch_size: int) -> None:
        self.forwards = tuple(forwards)
        self.batch_size = batch_size
        axes = [axis + 2 for axis in mirror]
        # The first is no flip at all
        self.flips = [subset for count in range(len(axes) + 1) for subset in combinations(axes, count)]

    def __call__(self, windows: Tensor) -> Tensor:
        """Waits for nothing."""
        together = max(self.batch_size // len(windows), 1)
        total: Tensor | None = None
        for start in range(0, len(self.flips), together):
            group = self.flips[start : start + together]
            stacked = windows if group == [()] else torch.cat([torch.flip(windows, axes) for axes in group])
            for forward in self.forwards:
                probabilities = torch.softmax(forward(stacked), dim=1, dtype=torch.float32)
                for part, axes in zip(probabilities.split(len(windows)), group, strict=True):
                    unflipped = torch.flip(part, axes) if axes else part
                    total = unflipped if total is None else total.add_(unflipped)
        assert total is not None
        count = len(self.flips) * len(self.forwards)
        return total.div_(count) if count > 1 else total


class RecordedAnswer:
    """An Answer to `slots`, a batch of windows of one shape at one place, as one CUDA graph.

    The graph reads the networks' weights where they lay when it was recorded: whoever keeps one while weights change must change
    them in place. What recording raises leaves here; nothing was computed then.
    """

    def __init__(self, answer: Answer, slots: Tensor) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Loaders go on meanwhile, and may ask for memory: only what this thread does is recorded
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._probabilities = answer(slots)

    def __call__(self) -> Tensor:
        """Probabilities of what lies in the slots, overwritten by the next call."""
        self._graph.replay()
        return self._probabilities
