"""Owns the making of one batch from its position: cases are looked up, patches cut, augmentation drawn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from fasttrain.augment import Augmenter, Chances, Draws
from fasttrain.batches.crop import CaseCentres, CentreTables, SliceOf, cut_patch
from fasttrain.batches.order import Order
from fasttrain.batches.slices import SliceTurns
from fasttrain.ranges import part
from fasttrain.recipe import Recipe
from fasttrain.samples import CaseSource

LABEL_TYPES = {1: torch.uint8, 2: torch.int16}
"""Of labels as they are kept, by `Task.label_bytes`."""


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
        with part("copy"):
            image, label = self.image.to(device, non_blocking=True), self.label.to(device, non_blocking=True)
        return RawBatch(image, label, self.draws, tuple(self.positions), tuple(self.names))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What lies on the device."""
        return self.image, self.label


@dataclass(frozen=True, eq=False)
class Drawn:
    """What is drawn of one batch: `cases` [n] and first voxels `corners` [n, d], both int64, and the draws of augmentation."""

    cases: np.ndarray
    corners: np.ndarray
    draws: Draws
    positions: tuple[int, ...]


class PatchMaker:
    """Everything a loader's worker needs; the batch at a position is the same whoever makes it. `source` None: it only draws."""

    def __init__(self, recipe: Recipe, source: CaseSource | None, order: Order) -> None:
        self.source = source
        self.order = order
        self.patch = recipe.patch
        self.reach = recipe.reach
        self.batch_size = recipe.training.batch_size
        self.channels = recipe.patch_channels
        self.neighbours = recipe.neighbours
        self.shaded = len(recipe.data.channels)
        self.label_type = LABEL_TYPES[recipe.task_facts.label_bytes]
        self.augmenter = Augmenter(
            recipe.augment, self.shaded, recipe.left_right_axis, recipe.sides, depth=recipe.depth
        )
        slices = recipe.data.slices
        self._turns = None if slices is None else SliceTurns(order.seed, slices.keep_empty)

    def draw(self, first_position: int, tables: CentreTables) -> Drawn:
        """What `make` draws for the batch at a position, from the tables of all cases; cuts nothing."""
        positions = self._positions(first_position)
        chances = Chances(self.order.seed, positions)
        cases = self.order.cases_at(positions)
        corners = tables.corners(cases, self.patch, chances, self._slices(cases, positions))
        return Drawn(cases, corners, self._augmentation(chances), tuple(positions.tolist()))

    def make(self, first_position: int) -> RawBatch:
        """The `batch_size` patches from `first_position` on: image float32, label uint8 (int16 for a dose)."""
        with part("cut"):
            return self._made(first_position)

    def _made(self, first_position: int) -> RawBatch:
        assert self.source is not None
        positions = self._positions(first_position)
        chances = Chances(self.order.seed, positions)
        image = torch.empty((self.batch_size, self.channels, *self.patch.size))
        label = torch.empty((self.batch_size, 1, *self.patch.size), dtype=self.label_type)
        names: list[str] = []
        # Patches of one case stand together; one volume is held at a time
        cases = self.order.cases_at(positions)
        for index, run in groupby(cases.tolist()):
            sample = self.source[index]
            rows = slice(len(names), len(names) + len(list(run)))
            assert sample.label is not None
            tables = CentreTables((CaseCentres.of(sample),))
            slices = self._slices(cases[rows], positions[rows])
            corners = tables.corners(np.zeros(rows.stop - rows.start, np.int64), self.patch, chances[rows], slices)
            for row, corner in enumerate(corners.tolist(), rows.start):
                image[row].copy_(cut_patch(sample.image, corner, self.patch.size, self.neighbours))
                label[row].copy_(cut_patch(sample.label, corner, self.patch.size))
                names.append(sample.name)
        return RawBatch(image, label, self._augmentation(chances), tuple(positions.tolist()), tuple(names))

    def _positions(self, first: int) -> np.ndarray:
        return np.arange(first, first + self.batch_size, dtype=np.int64)

    def _slices(self, cases: np.ndarray, positions: np.ndarray) -> SliceOf | None:
        """Where the samples of these cases at `positions` come from in volumes that are cut into slices."""
        turns = self._turns
        if turns is None:
            return None
        numbers = self.order.turns_at(positions)
        return lambda rows, filled: turns.at(cases[rows], numbers[rows], filled)

    def _augmentation(self, chances: Chances) -> Draws:
        return self.augmenter.draw(len(self.patch.size), self.shaded, chances)

    def augment(self, raw: RawBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the draws on the device where the patches are; image and label may be changed in place."""
        with part("augment"):
            return self.augmenter.apply(raw.image, raw.label, raw.draws)


def as_message(raw: RawBatch) -> dict[str, Any]:
    """A RawBatch in the form that a worker process can send and torch can pin.

    The draws are small and stay on the CPU: as arrays they go with the message, and not each by a descriptor of its own.
    """
    return {
        "image": raw.image,
        "label": raw.label,
        "draws": {name: {key: value.numpy() for key, value in draw.items()} for name, draw in raw.draws.items()},
        "positions": raw.positions,
        "names": raw.names,
    }


def from_message(message: dict[str, Any]) -> RawBatch:
    """The RawBatch of a message, whichever way its tensors took."""
    image, label = (
        value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        for value in (message["image"], message["label"])
    )
    draws = {
        name: {key: torch.from_numpy(value) for key, value in draw.items()} for name, draw in message["draws"].items()
    }
    return RawBatch(image, label, draws, tuple(message["positions"]), tuple(message["names"]))
