"""Owns the short measurement by which precision and memory layout are chosen on the machine at hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fasttrain.batches.patch_maker import LABEL_TYPES
from fasttrain.engine.checkpointing import checkpoint_blocks
from fasttrain.engine.optimisation.optim import build_optimizer
from fasttrain.engine.step import Precision, Step, unpacking
from fasttrain.errors import ran_out_of_memory
from fasttrain.losses import loss_of
from fasttrain.machine.hardware import Hardware
from fasttrain.networks import build_network
from fasttrain.networks.fused import fuse
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
HOPELESS = 3.0
"""So many times slower than the best of a round, in two rounds, and a candidate is not measured further."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 6
_BUDGET_SECONDS = 8.0
_MOST_PATCHES_ON_A_CPU = 2


class NotRecorded(Exception):  # noqa: N818 - not an error: the step was taken without
    """A step that was to be recorded as a CUDA graph was not."""


Key = TypeVar("Key")
Told = Callable[[int, int], None]
"""Told how many steps were measured, and of how many."""


@dataclass(frozen=True)
class Candidate:
    """One combination to measure."""

    amp: str
    channels_last: bool
    fused: bool = False
    captured: bool = False

    def __str__(self) -> str:
        layout = "NDHWC" if self.channels_last else "NCDHW"
        more = f"{' with fused layers' if self.fused else ''}{' in a CUDA graph' if self.captured else ''}"
        return f"{'float32' if self.amp == 'off' else self.amp} {layout}{more}"


def precision_of(candidate: Candidate, device_type: str, dimensions: int) -> Precision:
    """What a candidate means for a forward pass."""
    layout = torch.channels_last_3d if dimensions == 3 else torch.channels_last
    return Precision(device_type, DTYPES[candidate.amp], layout if candidate.channels_last else None)


def measure(
    recipe: Recipe,
    hardware: Hardware,
    candidates: list[Candidate],
    checkpointing: bool = False,
    told: Told = lambda done, total: None,
    held: dict[Candidate, int] | None = None,
) -> dict[Candidate, float]:
    """Seconds of one training step for each candidate, the least of a few; the most promising come first. `held` takes the bytes
    of a GPU's memory that each held at most, a recorded graph's among them.

    A candidate that cannot be recorded as a CUDA graph, for want of memory or otherwise, is measured without, and stands in the
    result as that.

    On a CPU the candidates take turns, since other processes come and go there. On a GPU one is measured after the other, since
    it is asked too whether a step fits into its memory: a candidate that does not is left out. Leaves torch's generators as they
    were.
    """
    device = hardware.torch_device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        if device.type == "cpu":
            return least_seconds(_sharing(recipe, device, candidates, checkpointing), told=told)
        seconds: dict[Candidate, float] = {}
        for number, candidate in enumerate(candidates):
            told(number, len(candidates))
            for way in dict.fromkeys((candidate, replace(candidate, captured=False))):
                before = _held_before(device)
                with _memory_may_end(), contextlib.suppress(NotRecorded):
                    seconds[way] = _seconds_of(recipe, device, way, checkpointing)
                    if held is not None:
                        held[way] = torch.cuda.max_memory_reserved(device) - before
                # What was tried is no longer referred to, and can be given back for the next one
                torch.cuda.empty_cache()
                if way in seconds:
                    break
        return seconds


def _held_before(device: torch.device) -> int:
    """Bytes in use as a measurement begins. Not what is reserved: a step that finds room in there would seem to need none."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def _memory_may_end() -> Iterator[None]:
    """A scope that ends quietly where memory ran out in any form: cuBLAS and cuDNN meet it as well as torch's allocator."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise


def held_by_batch(
    recipe: Recipe, hardware: Hardware, candidate: Candidate, checkpointing: bool, sizes: Sequence[int]
) -> dict[int, int]:
    """Bytes of the GPU's memory that a step of so many patches held at most; sizes that do not fit are left out."""
    device, held = hardware.torch_device, {}
    alone = replace(candidate, captured=False)
    with torch.random.fork_rng(devices=[device]):
        for size in sizes:
            training = recipe.training.model_copy(update={"batch_size": size})
            before = _held_before(device)
            with _memory_may_end():
                smaller = recipe.model_copy(update={"training": training})
                timer = _timer(smaller, device, alone, _learner(smaller, device, alone, checkpointing))
                # The second one holds the optimiser's state as well
                timer()
                timer()
                held[size] = torch.cuda.max_memory_reserved(device) - before
                del timer
            torch.cuda.empty_cache()
    return held


def least_seconds(
    timers: Mapping[Key, Callable[[], float]],
    budget_seconds: float = _BUDGET_SECONDS,
    told: Told = lambda done, total: None,
) -> dict[Key, float]:
    """The least of what each timer returned (seconds of a step), by its key.

    The timers take turns, a call each a round, so that a burst of other work slows all of a round and not one candidate: at least
    `LEAST_ROUNDS`, and up to `MOST_ROUNDS` while another round stays within the budget. One that was `HOPELESS` times slower than
    the best of its round in two rounds is dropped: some float32 NCDHW convolutions are many times slower on a CPU.
    """
    taken: dict[Key, list[float]] = {key: [] for key in timers}
    behind = dict.fromkeys(timers, 0)
    running, spent, calls = list(timers), 0.0, 0
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and spent + sum(min(taken[key]) for key in running) > budget_seconds:
            break
        ahead = calls + len(running) * max(LEAST_ROUNDS - number, 1)
        for key in running:
            told(calls, ahead)
            taken[key].append(timers[key]())
            calls += 1
        latest = {key: taken[key][-1] for key in running}
        spent += sum(latest.values())
        best = min(latest.values())
        for key, seconds in latest.items():
            behind[key] += seconds > best * HOPELESS
        running = [key for key in running if behind[key] < 2]
    return {key: min(seconds) for key, seconds in taken.items()}


def made_batch(recipe: Recipe, device: torch.device) -> Batch:
    """A batch of noise, of the recipe's shape but for a CPU's, which is smaller."""
    size = recipe.training.batch_size
    if device.type == "cpu":
        size = min(size, _MOST_PATCHES_ON_A_CPU)
    image = torch.randn(size, recipe.patch_channels, *recipe.patch.size, device=device)
    highest = 2 << len(recipe.data.classes) if recipe.task == "dose" else recipe.data.class_count
    kept = LABEL_TYPES[recipe.task_facts.label_bytes]
    label = torch.randint(0, highest, (size, 1, *recipe.patch.size), dtype=kept, device=device)
    return Batch(image, label, (), ())


def _seconds_of(recipe: Recipe, device: torch.device, candidate: Candidate, checkpointing: bool) -> float:
    step = _step(recipe, device, candidate, _learner(recipe, device, candidate, checkpointing))
    batch = made_batch(recipe, device)
    seconds = min(_timed(step, batch, device) for _ in range(MOST_ROUNDS))
    if step.warning is not None:
        raise NotRecorded(step.warning)
    return seconds


Learner = tuple[nn.Module, Optimizer]


def _sharing(
    recipe: Recipe, device: torch.device, candidates: list[Candidate], checkpointing: bool
) -> dict[Candidate, Callable[[], float]]:
    """A timer for each candidate; those of one layout share a network, so that no more than two are in memory."""
    learners: dict[bool, Learner] = {}
    timers = {}
    for candidate in candidates:
        if candidate.channels_last not in learners:
            learners[candidate.channels_last] = _learner(recipe, device, candidate, checkpointing)
        timers[candidate] = _timer(recipe, device, candidate, learners[candidate.channels_last])
    return timers


def _learner(recipe: Recipe, device: torch.device, candidate: Candidate, checkpointing: bool) -> Learner:
    network = network_for(recipe, device, candidate, checkpointing)
    return network, build_optimizer(recipe.optimizer, network.parameters())


def network_for(recipe: Recipe, device: torch.device, candidate: Candidate, checkpointing: bool) -> nn.Module:
    """A fresh network of the recipe in a candidate's form, in training mode."""
    network = build_network(recipe.network, recipe.patch.size, recipe.input_channels, recipe.output_channels)
    network.to(device)
    if candidate.fused:
        fuse(network)
    precision_of(candidate, device.type, recipe.dimensions).lay_out_network(network)
    if checkpointing:
        checkpoint_blocks(network)
    network.train()
    return network


def _timer(recipe: Recipe, device: torch.device, candidate: Candidate, learner: Learner) -> Callable[[], float]:
    step, batch = _step(recipe, device, candidate, learner), made_batch(recipe, device)
    return lambda: _timed(step, batch, device)


def _step(recipe: Recipe, device: torch.device, candidate: Candidate, learner: Learner) -> Step:
    network, optimizer = learner
    precision = precision_of(candidate, device.type, recipe.dimensions)
    loss = loss_of(recipe, candidate.fused)
    return Step(
        network, loss, optimizer, precision, accumulate=1, captured=candidate.captured, unpack=unpacking(recipe)
    )


def _timed(step: Step, batch: Batch, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step(iter([batch]), 1e-4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
