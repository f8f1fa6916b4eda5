"""Owns one optimiser step: forward, backward and update of `accumulate` batches, with nothing read back to the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fasttrain.engine.captured import CapturedStep
from fasttrain.engine.optimisation.ema import Ema
from fasttrain.engine.together import Alone, Together, steps_to_a_graph
from fasttrain.errors import FasttrainError
from fasttrain.kernels.structure_bits import unpack
from fasttrain.ranges import part as named
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch


@dataclass(frozen=True)
class Precision:
    """What a forward pass computes in. `dtype` None: float32 throughout. `memory_format` None: plain NCDHW."""

    device_type: str
    dtype: torch.dtype | None
    memory_format: torch.memory_format | None

    def autocast(self) -> AbstractContextManager[None]:
        """The scope of a forward pass."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)

    def laid_out(self, image: Tensor) -> Tensor:
        """The image in the layout of the network's weights."""
        return image if self.memory_format is None else image.contiguous(memory_format=self.memory_format)

    def lay_out_network(self, network: nn.Module) -> None:
        """Brings the network's weights into the layout, in place."""
        if self.memory_format is not None:
            network.to(memory_format=self.memory_format)  # type: ignore[call-overload]


Unpack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From a batch's image and label to what the network sees and what the loss compares its answer with, on the device."""


def _as_it_is(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    return image, label


def unpacking(recipe: Recipe) -> Unpack:
    """How a recipe's batches are unpacked."""
    if recipe.task != "dose":
        return _as_it_is
    return functools.partial(unpack, structures=len(recipe.data.classes))


class Step:
    """Takes batches, changes weights, and keeps what became of it in device tensors.

    A step whose loss or gradients are not finite changes no weight: the fused optimiser is told so by a flag on the device (the
    way torch's GradScaler does it), and the running statistics of normalisation layers are put back.

    unpack: makes of a batch what the network sees; nothing is done where it is None. clip_norm: gradients are scaled down to
    this norm over all weights. ema: follows the weights. compiled: network and loss go through torch.compile; captured: the
    whole step becomes a CUDA graph once the first few were taken. Where either fails, `warning` says so and the run goes on
    without. together: the other ranks that take the same step.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        accumulate: int,
        clip_norm: float | None = None,
        ema: Ema | None = None,
        compiled: bool = False,
        captured: bool = False,
        unpack: Unpack | None = None,
        together: Together | None = None,
    ) -> None:
        self.together: Together = together or Alone()
        self.network = network
        self.unpack = unpack or _as_it_is
        self.loss = loss
        self.optimizer = optimizer
        self.precision = precision
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.ema = ema
        self.warning: str | None = None
        device = next(network.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.dtype is torch.float16)
        self.last_loss = torch.zeros((), device=device)
        self.bad_streak = torch.zeros((), dtype=torch.int64, device=device)
        self.worst_streak = torch.zeros((), dtype=torch.int64, device=device)
        inner: nn.Module = torch.compile(network, dynamic=False) if compiled else network  # type: ignore[assignment]
        self._forward: Callable[[Tensor], Any] = self.together.wrap(inner)
        self._criterion: Callable[[Any, Tensor], Tensor] = torch.compile(loss, dynamic=False) if compiled else loss
        self._unproved = compiled
        self._parts: list[float] | None = None
        """Of a short step: what the loss of each of its batches is divided by."""
        self._part: float = accumulate
        before = steps_to_a_graph(self.together.ranks)
        self._captured = CapturedStep(self._take, optimizer, before) if captured else None
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._statistics = [buffer for buffer in network.buffers() if buffer.is_floating_point()]

    def __call__(self, batches: Iterator[Batch], learning_rate: float, number: int = 0) -> Tensor:
        """One step, the `number`th from 0; returns the mean loss over the batches, a device tensor."""
        self._prepare(learning_rate, number)
        if self._captured is None:
            return self._take(batches)
        return self._by_graph(self._captured, [next(batches) for _ in range(self.accumulate)], learning_rate)

    def short(self, batches: list[Batch], learning_rate: float, number: int = 0) -> Tensor:
        """A step over fewer samples than others have; returns the mean loss over them. Its shapes come once, so that it is
        neither compiled nor recorded.
        """
        self._prepare(learning_rate, number)
        sizes = [batch.image.shape[0] for batch in batches]
        self._parts = [sum(sizes) / size for size in sizes]
        try:
            if self._captured is None:
                return self._take(iter(batches))
            return self._captured.take_apart(batches, counted=False)
        finally:
            self._parts = None

    @contextlib.contextmanager
    def without_graph(self) -> Iterator[None]:
        """A scope in which steps are launched kernel by kernel although one was recorded as a CUDA graph."""
        kept, self._captured = self._captured, None
        try:
            yield
        finally:
            self._captured = kept

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as one CUDA graph."""
        return self._captured is not None and self._captured.recorded

    def _prepare(self, learning_rate: float, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.together.before_step(number)
        if self.ema is not None:
            self.ema.before_step(number)

    def _take(self, batches: Iterator[Batch]) -> Tensor:
        """The step itself, all of it on the device."""
        kept = [buffer.clone() for buffer in self._statistics]
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.last_loss.device)
        parts = self._parts or [self.accumulate] * self.accumulate
        for number, part in enumerate(parts, 1):
            batch, self._part = next(batches), part
            unproved = self._unproved and self._parts is None
            inner = self.together.inner_pass(self._forward) if number < len(parts) else contextlib.nullcontext()
            with inner:
                total += self._first_pass(batch) if unproved else self._pass(batch)
        if self._parts is not None:
            # The same samples on every rank, but not to the last bit on a GPU
            self.together.mean_of_all([one.grad for one in self._parameters if one.grad is not None])
        with named("optimiser"):
            # Before it is judged: all ranks take the step, or none
            total = self.together.mean_(total)
            self._settle(total, self._update(total), kept)
            if self.ema is not None:
                self.ema.update()
        return total

    def _by_graph(self, graph: CapturedStep, batches: list[Batch], learning_rate: float) -> Tensor:
        if graph.due and not self._recorded(graph, batches, learning_rate):
            # Recording computed nothing: the step is still to be taken, with the memory that the recording held
            self._captured = None
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            return self._take(iter(batches))
        if graph.recorded and graph.fits(batches):
            return graph.replay(batches, learning_rate)
        return graph.take_apart(batches)

    def _recorded(self, graph: CapturedStep, batches: list[Batch], learning_rate: float) -> bool:
        """Whether it could be; where not, `warning` says why, and nothing is left that holds on to what was recorded."""
        try:
            graph.record(batches, learning_rate)
        except FasttrainError:
            raise
        except Exception as error:
            told = " ".join(str(error).split()) or type(error).__name__
            self.warning = f"the step could not be recorded as a CUDA graph, so it runs without: {told[:200]}"
            return False
        return True

    def _pass(self, batch: Batch) -> Tensor:
        """Forward and backward of one batch; returns its share of the step's loss."""
        forward, criterion = (self._forward, self._criterion) if self._parts is None else (self.network, self.loss)
        image, target = self.unpack(batch.image, batch.label)
        with named("forward"):
            with self.precision.autocast():
                logits = forward(self.precision.laid_out(image))
            loss = criterion(logits, target) / self._part
        with named("backward"):
            self.scaler.scale(loss).backward()
        return loss.detach()

    def _first_pass(self, batch: Batch) -> Tensor:
        """The pass in which the compiler works. What it cannot do is done without it, from the same weights and draws."""
        self._unproved = False
        device = self.last_loss.device
        devices = [device] if device.type == "cuda" else []
        state = torch.get_rng_state(), [torch.cuda.get_rng_state(one) for one in devices]
        statistics = [buffer.clone() for buffer in self._statistics]
        try:
            return self._pass(batch)
        except Exception as error:
            if not _from_the_compiler(error):
                raise
            told = " ".join(str(error).split())
            self.warning = f"torch.compile failed, so the network runs without it: {told[:200]}"
        self._forward, self._criterion = self.together.wrap(self.network), self.loss
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self._statistics, statistics, strict=True):
            buffer.copy_(before)
        torch.set_rng_state(state[0])
        for one, saved in zip(devices, state[1], strict=True):
            torch.cuda.set_rng_state(saved, one)
        return self._pass(batch)

    def _update(self, loss: Tensor) -> Tensor:
        """Takes the step unless something is not finite, and says whether all was, a bool on the device.

        Under loss scaling gradients overflow now and then, and the scaler answers by a lower scale; twenty times in a row,
        which divides it by a million, is no longer that.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.scaler.is_enabled() and self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = torch.isfinite(norm + loss)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip_norm, norm)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif takes_flag(self.optimizer):
            self.optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):
            # Without a fused optimiser the host has to wait for the answer
            self.optimizer.step()
        return finite

    def _settle(self, loss: Tensor, finite: Tensor, kept: list[Tensor]) -> None:
        for buffer, before in zip(self._statistics, kept, strict=True):
            torch.where(torch.isfinite(buffer).all() & finite, buffer, before, out=buffer)
        self.last_loss.copy_(loss)
        self.bad_streak.add_(1).mul_(~finite)
        torch.maximum(self.worst_streak, self.bad_streak, out=self.worst_streak)


def takes_flag(optimizer: Optimizer) -> bool:
    """True for an optimiser that leaves a step out on `found_inf`, a flag on the device, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _from_the_compiler(error: BaseException) -> bool:
    """True where torch.compile or what it calls (Triton, a C compiler) failed, and not the network itself."""
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
