"""Owns a training step as one CUDA graph: what the host would launch kernel by kernel is launched at once.

The first steps run as they are, on a stream of their own, as torch asks for (they let cuDNN choose and Triton compile); then
one is recorded, which computes nothing, and from there on replayed. So no step is taken that a run without a graph would not
take, and no weight or generator needs putting back. What changes from step to step reaches the graph through memory: batches,
the learning rate, the weight of the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fasttrain.ranges import part
from fasttrain.samples import Batch

STEPS_BEFORE = 3
"""torch's own number of warm-up iterations."""


class CapturedStep:
    """Replays `take`, which computes one optimiser step from the batches it is given and returns the loss.

    Raises from `record` whatever capturing raises; `take` can then be called as before.
    """

    def __init__(
        self, take: Callable[[Iterator[Batch]], Tensor], optimizer: Optimizer, steps_before: int = STEPS_BEFORE
    ) -> None:
        self._take = take
        self._steps_before = steps_before
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._slots: list[Batch] = []
        self._loss: Tensor | None = None
        self._rate: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._taken = 0

    @property
    def due(self) -> bool:
        """Whether enough steps were taken for the next one to be recorded."""
        return self._graph is None and self._taken >= self._steps_before

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    def take_apart(self, batches: Sequence[Batch], counted: bool = True) -> Tensor:
        """A step kernel by kernel, on a stream of its own; one of the first where it counts as that."""
        self._taken += counted
        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._take(iter(batches))
        current.wait_stream(self._stream)
        return loss

    def record(self, batches: Sequence[Batch], learning_rate: float) -> None:
        """Records a step over batches of these shapes."""
        device = batches[0].image.device
        slots = [Batch(torch.empty_like(batch.image), torch.empty_like(batch.label), (), ()) for batch in batches]
        rate = torch.full((), learning_rate, device=device)
        groups = self._optimizer.param_groups
        kept: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        graph = torch.cuda.CUDAGraph()
        try:
            for group in groups:
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = True
            self._optimizer.zero_grad(set_to_none=True)
            # Threads that pin or copy batches go on meanwhile: only what this thread does is recorded
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._take(iter(slots))
        finally:
            # A checkpoint should hold numbers, and be taken up on a CPU, too
            for group, values in zip(groups, kept, strict=True):
                group.update(values)
        self._slots, self._rate, self._loss, self._graph = slots, rate, loss, graph

    def replay(self, batches: Sequence[Batch], learning_rate: float) -> Tensor:
        """The recorded step over other batches; the loss is overwritten by the next one."""
        assert self._graph is not None
        assert self._rate is not None
        assert self._loss is not None
        for slot, batch in zip(self._slots, batches, strict=True):
            slot.image.copy_(batch.image)
            slot.label.copy_(batch.label)
        self._rate.fill_(learning_rate)
        with part("graph"):
            self._graph.replay()
        return self._loss

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether batches have the shapes that were recorded."""
        return len(batches) == len(self._slots) and all(
            slot.image.shape == batch.image.shape and slot.image.dtype == batch.image.dtype
            for slot, batch in zip(self._slots, batches, strict=True)
        )
