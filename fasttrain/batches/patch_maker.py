"""Owns the making of one batch from its position: cases are looked up, patches cut, augmentation drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fasttrain.augment import Augmenter, Draws, stack
from fasttrain.batches.crop import cut, draw_corner
from fasttrain.batches.order import Order
from fasttrain.recipe import Recipe
from fasttrain.samples import CaseSource


@dataclass(frozen=True)
class RawBatch:
    """Patches that were cut but not yet augmented, with the draws of their augmentation."""

    image: torch.Tensor
    label: torch.Tensor
    draws: Draws
    positions: tuple[int, ...]
    names: tuple[str, ...]

    def to(self, device: torch.device) -> RawBatch:
        """The batch with its patches on `device`, copied without waiting where they are pinned."""
        image, label = self.image.to(device, non_blocking=True), self.label.to(device, non_blocking=True)
        return RawBatch(image, label, self.draws, tuple(self.positions), tuple(self.names))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What lies on the device."""
        return self.image, self.label


class PatchMaker:
    """Everything a loader's worker needs; the batch at a position is the same whoever makes it."""

    def __init__(self, recipe: Recipe, source: CaseSource, order: Order) -> None:
        self.source = source
        self.order = order
        self.patch = recipe.patch
        self.batch_size = recipe.training.batch_size
        self.channels = len(recipe.data.channels)
        self.augmenter = Augmenter(recipe.augment)

    def make(self, first_position: int) -> RawBatch:
        """The `batch_size` patches from `first_position` on: image float32, label uint8."""
        generator = torch.Generator()
        positions = tuple(range(first_position, first_position + self.batch_size))
        image = torch.empty((self.batch_size, self.channels, *self.patch.size))
        label = torch.empty((self.batch_size, 1, *self.patch.size), dtype=torch.uint8)
        draws, names = [], []
        held, sample = -1, None
        for row, position in enumerate(positions):
            index = self.order.case_at(position)
            if sample is None or index != held:
                held, sample = index, self.source[index]
            generator.manual_seed(self.order.seed_at(position))
            corner = draw_corner(sample, self.patch, generator)
            assert sample.label is not None
            image[row].copy_(cut(sample.image, corner, self.patch.size))
            label[row].copy_(cut(sample.label, corner, self.patch.size))
            draws.append(self.augmenter.draw(len(self.patch.size), self.channels, generator))
            names.append(sample.name)
        return RawBatch(image, label, stack(draws), positions, tuple(names))

    def augment(self, raw: RawBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the draws on the device where the patches are; image and label may be changed in place."""
        return self.augmenter.apply(raw.image, raw.label, raw.draws)


def as_message(raw: RawBatch) -> dict[str, Any]:
    """A RawBatch in the form that a worker process can send and torch can pin."""
    return {
        "image": raw.image,
        "label": raw.label,
        "draws": raw.draws,
        "positions": raw.positions,
        "names": raw.names,
    }
