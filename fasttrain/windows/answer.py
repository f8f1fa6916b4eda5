"""Owns what networks answer to a batch of windows: probabilities, averaged over flips and networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""A network in eval mode: [batch, channel, *patch] → logits [batch, class, *patch]."""


Finish = Callable[[Tensor], Tensor]
"""From a network's answer to what is averaged over flips, networks and windows: float32, of the same shape."""


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of the classes."""
    return torch.softmax(logits, dim=1, dtype=torch.float32)


def sigmoid(logits: Tensor) -> Tensor:
    """Probabilities of regions, each by itself."""
    return torch.sigmoid(logits.float())


@dataclass(frozen=True)
class Sides:
    """Channels of a window that change places where it is mirrored along spatial `axis`, as (left, right)."""

    axis: int
    pairs: tuple[tuple[int, int], ...]

    def exchanged(self, windows: Tensor) -> Tensor:
        """The windows with the channels of each pair in the other's place."""
        order = list(range(windows.shape[1]))
        for left, right in self.pairs:
            order[left], order[right] = right, left
        # Views, and no index of the host's, which a recorded graph could not copy
        return torch.cat([windows[:, channel : channel + 1] for channel in order], dim=1)


class Answer:
    """What `finish` makes of networks' answers, by default softmax probabilities: [batch, class, *patch] float32 of windows
    [batch, channel, *patch].

    The mean over all 2^n combinations of the flips of the spatial axes `mirror`, and over `forwards`, several networks that
    answer as one; `sides` keep what lies left and right called so in mirrored windows. A network sees at most `batch_size`
    patches at a time, and as many flips of few windows in one pass as there is room for.
    """

    def __init__(
        self,
        forwards: Sequence[Forward],
        mirror: Sequence[int],
        batch_size: int,
        finish: Finish = softmax,
        sides: Sides | None = None,
    ) -> None:
        self.finish = finish
        self.sides = sides
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
            stacked = windows if group == [()] else torch.cat([self._flipped(windows, axes) for axes in group])
            for forward in self.forwards:
                probabilities = self.finish(forward(stacked))
                for part, axes in zip(probabilities.split(len(windows)), group, strict=True):
                    unflipped = torch.flip(part, axes) if axes else part
                    total = unflipped if total is None else total.add_(unflipped)
        assert total is not None
        count = len(self.flips) * len(self.forwards)
        return total.div_(count) if count > 1 else total

    def _flipped(self, windows: Tensor, axes: tuple[int, ...]) -> Tensor:
        flipped = torch.flip(windows, axes)
        return self.sides.exchanged(flipped) if self.sides is not None and self.sides.axis + 2 in axes else flipped


def of_slices(forward: Forward) -> Forward:
    """For windows that are one voxel deep, [batch, channel, 1, *slice], what a network for planes answers."""

    def answer(windows: Tensor) -> Tensor:
        return forward(windows.squeeze(2)).unsqueeze(2)

    return answer


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
