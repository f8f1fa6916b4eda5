"""Owns one optimiser step: forward, backward and update of `accumulate` batches, with nothing read back to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


class Step:
    """Takes batches, changes weights, and keeps what became of it in device tensors.

    A step whose loss or gradients are not finite changes no weight: the fused optimiser is told so by a flag on the device (the
    way torch's GradScaler does it), and the running statistics of normalisation layers are put back.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        accumulate: int,
    ) -> None:
        self.network = network
        self.loss = loss
        self.optimizer = optimizer
        self.precision = precision
        self.accumulate = accumulate
        device = next(network.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.dtype is torch.float16)
        self.last_loss = torch.zeros((), device=device)
        self.bad_streak = torch.zeros((), dtype=torch.int64, device=device)
        self.worst_streak = torch.zeros((), dtype=torch.int64, device=device)
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._statistics = [buffer for buffer in network.buffers() if buffer.is_floating_point()]

    def __call__(self, batches: Iterator[Batch], learning_rate: float) -> Tensor:
        """One step; returns the mean loss over the batches, a device tensor."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        kept = [buffer.clone() for buffer in self._statistics]
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.last_loss.device)
        for _ in range(self.accumulate):
            batch = next(batches)
            with self.precision.autocast():
                logits = self.network(self.precision.laid_out(batch.image))
            loss = self.loss(logits, batch.label) / self.accumulate
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self._settle(total, self._update(total), kept)
        return total

    def _update(self, loss: Tensor) -> Tensor:
        """Takes the step unless something is not finite, and says whether all was, a bool on the device.

        Under loss scaling gradients overflow now and then, and the scaler answers by a lower scale; twenty times in a row,
        which divides it by a million, is no longer that.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        finite = torch.isfinite(torch.nn.utils.get_total_norm(gradients) + loss)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return finite
        self.optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        self.optimizer.step()
        return finite

    def _settle(self, loss: Tensor, finite: Tensor, kept: list[Tensor]) -> None:
        for buffer, before in zip(self._statistics, kept, strict=True):
            torch.where(torch.isfinite(buffer).all() & finite, buffer, before, out=buffer)
        self.last_loss.copy_(loss)
        self.bad_streak.add_(1).mul_(~finite)
        torch.maximum(self.worst_streak, self.bad_streak, out=self.worst_streak)
