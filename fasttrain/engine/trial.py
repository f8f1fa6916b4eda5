"""Owns the short measurement by which precision and memory layout are chosen on the machine at hand."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fasttrain.engine.checkpointing import checkpoint_blocks
from fasttrain.engine.optim import build_optimizer
from fasttrain.engine.step import Precision, Step
from fasttrain.losses import build_loss
from fasttrain.machine.hardware import Hardware
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_HOPELESS = 2.5
_MOST_PATCHES_ON_A_CPU = 2


@dataclass(frozen=True)
class Candidate:
    """One combination to measure."""

    amp: str
    channels_last: bool

    def __str__(self) -> str:
        return f"{'float32' if self.amp == 'off' else self.amp} {'NDHWC' if self.channels_last else 'NCDHW'}"


def precision_of(candidate: Candidate, device_type: str, dimensions: int) -> Precision:
    """What a candidate means for a forward pass."""
    layout = torch.channels_last_3d if dimensions == 3 else torch.channels_last
    return Precision(device_type, DTYPES[candidate.amp], layout if candidate.channels_last else None)


def measure(
    recipe: Recipe, hardware: Hardware, candidates: list[Candidate], checkpointing: bool = False
) -> dict[Candidate, float]:
    """Seconds of one training step for each candidate, the least of a few after a warm-up; the most promising come first.

    A candidate that the GPU has no memory for is left out.

    A candidate whose warm-up is far behind the best so far is not measured further: some float32 NCDHW convolutions are
    many times slower on a CPU. Leaves torch's generators as they were.
    """
    device = hardware.torch_device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        seconds: dict[Candidate, float] = {}
        for candidate in candidates:
            best = min(seconds.values(), default=float("inf"))
            try:
                seconds[candidate] = _seconds_of(recipe, device, candidate, best, checkpointing)
            except torch.OutOfMemoryError:
                # What was tried is no longer referred to, and can be given back for the next one
                torch.cuda.empty_cache()
        return seconds


def _made_batch(recipe: Recipe, device: torch.device) -> Batch:
    size = recipe.training.batch_size
    if device.type == "cpu":
        size = min(size, _MOST_PATCHES_ON_A_CPU)
    image = torch.randn(size, len(recipe.data.channels), *recipe.patch.size, device=device)
    label = torch.randint(0, recipe.data.class_count, (size, 1, *recipe.patch.size), dtype=torch.uint8, device=device)
    return Batch(image, label, (), ())


def _seconds_of(recipe: Recipe, device: torch.device, candidate: Candidate, best: float, checkpointing: bool) -> float:
    batch = _made_batch(recipe, device)
    precision = precision_of(candidate, device.type, recipe.dimensions)
    network = build_network(recipe.network, recipe.patch.size, len(recipe.data.channels), recipe.output_channels)
    network.to(device)
    precision.lay_out_network(network)
    if checkpointing:
        checkpoint_blocks(network)
    optimizer = build_optimizer(recipe.optimizer, network.parameters())
    step = Step(network, build_loss(recipe.loss), optimizer, precision, accumulate=1)
    network.train()
    first = _timed(step, batch, device)
    if device.type == "cpu" and first > best * _HOPELESS:
        return first
    return min(_timed(step, batch, device) for _ in range(2 if device.type == "cpu" else 5))


def _timed(step: Step, batch: Batch, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step(iter([batch]), 1e-4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
