"""Owns how the windows of one volume become its probabilities: weighed, summed and handed on slab by slab."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fasttrain.windows.layout import Layout, of_all_channels

_VALUES_AT_ONCE = 1 << 25
"""Probabilities that are handed on at a time: 128 MiB, which bounds what is made of them."""


class Sink(Protocol):
    """Takes the probabilities of a volume in order along one axis."""

    def add(self, axis: int, begin: int, probabilities: Tensor) -> None:
        """Takes those of the planes from `begin` on along spatial `axis`, [class, *spatial]; they are overwritten afterwards."""


class Whole:
    """A Sink that keeps all: float32 [class, *spatial]."""

    def __init__(self, spatial: tuple[int, ...]) -> None:
        self.spatial = spatial
        self.probabilities: Tensor | None = None

    def add(self, axis: int, begin: int, probabilities: Tensor) -> None:
        """See Sink."""
        if self.probabilities is None:
            self.probabilities = probabilities.new_empty((len(probabilities), *self.spatial))
        self.probabilities.narrow(axis + 1, begin, probabilities.shape[axis + 1]).copy_(probabilities)


class Stitch:
    """Sums windows that come in the order of `layout.corners()`, on `device`.

    Planes that no later window reaches go to the sink at once, so that the sums are as thick as one window along
    `layout.axis`. A volume of one window needs no sums. Sums are float32, whatever the windows are.
    """

    def __init__(self, layout: Layout, weights: Tensor, sink: Sink, device: torch.device) -> None:
        self.layout = layout
        self.weights = weights
        self.sink = sink
        self.device = device
        self.done = 0
        self._sums: Tensor | None = None
        self._begin = 0
        """The plane of the padded volume at which the sums begin."""

    @property
    def complete(self) -> bool:
        """Whether the sink has everything."""
        return self.done == self.layout.windows

    def add(self, corner: tuple[int, ...], probabilities: Tensor) -> None:
        """Takes the next window's probabilities [class, *patch], which lie on the stitch's device."""
        layout, axis = self.layout, self.layout.axis
        self.done += 1
        if layout.windows == 1:
            self._hand_on(0, probabilities)
            return
        if self._sums is None:
            self._sums = torch.zeros((len(probabilities) + 1, *layout.slab), dtype=torch.float32, device=self.device)
        if corner[axis] > self._begin:
            self._move_on(corner[axis])
        start = [0 if one == axis else first for one, first in enumerate(corner)]
        box = tuple(slice(first, first + length) for first, length in zip(start, layout.patch, strict=True))
        self._sums[:-1][of_all_channels(box)].addcmul_(probabilities, self.weights)
        self._sums[-1][box].add_(self.weights)
        if self.complete:
            self._close(layout.patch[axis])
            self._sums = None

    def _move_on(self, begin: int) -> None:
        assert self._sums is not None
        along, thickness = self.layout.axis + 1, self.layout.patch[self.layout.axis]
        finished = begin - self._begin
        self._close(finished)
        left = thickness - finished
        if left:
            kept = self._sums.narrow(along, finished, left).clone()
            self._sums.narrow(along, 0, left).copy_(kept)
        self._sums.narrow(along, left, finished).zero_()
        self._begin = begin

    def _close(self, planes: int) -> None:
        """Hands on the first planes of the sums, divided by the weights."""
        assert self._sums is not None
        sums = self._sums.narrow(self.layout.axis + 1, 0, planes)
        self._hand_on(self._begin, sums[:-1].div_(sums[-1]))

    def _hand_on(self, begin: int, probabilities: Tensor) -> None:
        axis = self.layout.axis
        inner = list(self.layout.inner)
        if self.layout.windows > 1:
            # Along an axis of several windows nothing was padded
            inner[axis] = slice(None)
        shown = probabilities[of_all_channels(inner)]
        planes = shown.shape[axis + 1]
        step = max(_VALUES_AT_ONCE * planes // max(shown.numel(), 1), 1)
        for first in range(0, planes, step):
            self.sink.add(axis, begin + first, shown.narrow(axis + 1, first, min(step, planes - first)))
