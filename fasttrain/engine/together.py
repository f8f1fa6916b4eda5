"""Owns what several ranks do to one optimiser step: gradients and losses become means over all of them."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from fasttrain.engine.captured import STEPS_BEFORE

_STEPS_BEFORE = 11
"""torch's own number of warm-up iterations where DistributedDataParallel is recorded."""
_BUCKET_MIB = 25


def steps_to_a_graph(ranks: int) -> int:
    """Steps that a GPU takes before one is recorded, where steps are."""
    return STEPS_BEFORE if ranks == 1 else _STEPS_BEFORE


class Together(Protocol):
    """How a step is taken with others."""

    ranks: int

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network whose backward pass leaves the mean gradients of all ranks."""
        ...

    def before_step(self, number: int) -> None:
        """The `number`th step of the run is next, from 0."""
        ...

    def inner_pass(self, wrapped: object) -> AbstractContextManager[None]:
        """The scope of a forward and backward pass after which more of the same step follow: nothing is sent."""
        ...

    def mean_(self, value: Tensor) -> Tensor:
        """The mean over all ranks, in place."""
        ...

    def mean_of_all(self, values: Sequence[Tensor]) -> None:
        """The mean over all ranks of each, in place."""
        ...


class Alone:
    """One rank: nothing is sent."""

    ranks = 1

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network as it is."""
        return network

    def before_step(self, number: int) -> None:
        """Nothing is to be done."""

    def inner_pass(self, wrapped: object) -> AbstractContextManager[None]:
        """A scope of no meaning."""
        return contextlib.nullcontext()

    def mean_(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def mean_of_all(self, values: Sequence[Tensor]) -> None:
        """They stay as they are."""


class DataParallel:
    """torch's DistributedDataParallel over the default process group: gradients travel in buckets beside the backward pass.

    passes: of a step. Where there are several, the graph cannot be told to be static: torch fails where the first pass of all is
    one after which nothing is sent. seed: what the network draws itself, such as dropout, is another's on every rank. The first
    one's generators are saved; on the others they are a function of seed, rank and step, so that a resume finds them again.
    """

    def __init__(self, ranks: int, passes: int = 1, rank: int = 0, seed: int = 0) -> None:
        self.ranks = ranks
        self._rank = rank
        self._seed = seed
        self._generator: torch.Generator | None = None
        self.static_graph = passes == 1

    def wrap(self, network: nn.Module) -> nn.Module:
        """Raises RuntimeError where the ranks' networks differ in their weights' shapes."""
        from torch.nn.parallel import DistributedDataParallel

        device = next(network.parameters()).device
        self.draw_from(network)
        # Steps run on a stream of their own before one is recorded; the recorded ones, which are nearly all, know no streams
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        # Of filters of one voxel, whose strides channels-last leaves open: their few gradients are copied
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # On a stream of its own, as torch asks for where steps are recorded
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            wrapped = DistributedDataParallel(
                network,
                device_ids=[device] if device.type == "cuda" else None,
                bucket_cap_mb=_BUCKET_MIB,
                gradient_as_bucket_view=True,
                static_graph=self.static_graph,
            )
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
        return wrapped

    def draw_from(self, network: nn.Module) -> None:
        """Takes charge of the generator of the network's device, but for the first rank's."""
        device = next(network.parameters()).device
        if self._rank and device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        elif self._rank:
            self._generator = torch.default_generator

    def before_step(self, number: int) -> None:
        """Sets what a rank beside the first draws from, a recorded step too."""
        if self._generator is not None:
            words = f"{self._seed} {self._rank} {number}".encode()
            self._generator.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little"))

    def inner_pass(self, wrapped: object) -> AbstractContextManager[None]:
        """DistributedDataParallel's own `no_sync`."""
        return wrapped.no_sync()  # type: ignore[attr-defined]

    def mean_(self, value: Tensor) -> Tensor:
        """By one sum over all ranks, on the device."""
        import torch.distributed as dist

        dist.all_reduce(value)
        return value.div_(self.ranks)

    def mean_of_all(self, values: Sequence[Tensor]) -> None:
        """One after another."""
        for value in values:
            self.mean_(value)
