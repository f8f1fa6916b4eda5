"""Owns how a loss is spread over the heads of a deeply supervised network."""

from __future__ import annotations

from torch import Tensor, nn


def head_weights(heads: int) -> tuple[float, ...]:
    """1, 1/2, 1/4, … scaled to a sum of 1, the finest head first (nnU-Net's, but for the coarsest, which it gives 0)."""
    weights = [0.5**index for index in range(heads)]
    return tuple(weight / sum(weights) for weight in weights)


def shrink_label(label: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The voxels of `label` [batch, 1, *spatial] nearest to the centres of a coarser grid of `shape`, as a view.

    Raises ValueError where the label's shape is not a multiple of `shape`.
    """
    sizes = tuple(label.shape[2:])
    if len(sizes) != len(shape) or any(size % coarse for size, coarse in zip(sizes, shape, strict=True)):
        raise ValueError(f"a label of {sizes} cannot be brought to a head of {shape}: not a multiple on every axis")
    steps = [size // coarse for size, coarse in zip(sizes, shape, strict=True)]
    index = (slice(None), slice(None), *(slice(step // 2, None, step) for step in steps))
    return label[index]


class DeepSupervisionLoss(nn.Module):
    """Applies `loss` to the one output of a network, or to each of its heads with falling weights."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor | tuple[Tensor, ...], label: Tensor) -> Tensor:
        """Float32 scalar from logits [batch, class, *spatial], or a tuple of them, and label [batch, 1, *spatial]."""
        if isinstance(logits, Tensor):
            single: Tensor = self.loss(logits, label)
            return single
        weights = head_weights(len(logits))
        total: Tensor = weights[0] * self.loss(logits[0], shrink_label(label, tuple(logits[0].shape[2:])))
        for weight, head in zip(weights[1:], logits[1:], strict=True):
            total = total + weight * self.loss(head, shrink_label(label, tuple(head.shape[2:])))
        return total
