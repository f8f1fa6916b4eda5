"""Owns the rehearsal of a training step on made data, by which is known what it will launch before any case was read."""

from __future__ import annotations

import math

import numpy as np
import torch

from fasttrain.batches import Order, ResidentSource, fill
from fasttrain.batches.device_room import voxel_bytes
from fasttrain.batches.patch_maker import LABEL_TYPES
from fasttrain.engine.planning.trial import Candidate, made_batch, network_for, precision_of
from fasttrain.engine.step import unpacking
from fasttrain.losses import loss_of
from fasttrain.machine.hardware import Hardware
from fasttrain.recipe import Recipe
from fasttrain.samples import Grid, Sample


def rehearse(recipe: Recipe, hardware: Hardware, candidate: Candidate) -> None:
    """Forward, loss and backward of a network that is thrown away, and a batch that is cut and augmented on the GPU.

    cuDNN chooses its ways for these shapes. There is no optimiser, whose making loads torch's compiler. Leaves torch's generators
    as they were.
    """
    device = hardware.torch_device
    torch.cuda.set_device(device)
    with torch.random.fork_rng(devices=[device]):
        network = network_for(recipe, device, candidate, checkpointing=False)
        precision = precision_of(candidate, device.type, recipe.dimensions)
        loss = loss_of(recipe, candidate.fused)
        batch = made_batch(recipe, device)
        image, target = unpacking(recipe)(batch.image, batch.label)
        with precision.autocast():
            logits = network(precision.laid_out(image))
        loss(logits, target).backward()
        _rehearse_batch(recipe, device)


def _rehearse_batch(recipe: Recipe, device: torch.device) -> None:
    room = math.prod(recipe.box) * voxel_bytes(recipe)
    resident = fill(_OneCase(recipe), recipe, device, room)
    source = ResidentSource(recipe, resident, Order(1, recipe.data.samples_per_case, recipe.training.seed), device)
    next(source.batches(0))
    source.close()


class _OneCase:
    """A case source of one made volume, as large as a patch."""

    def __init__(self, recipe: Recipe) -> None:
        size, data = recipe.box, recipe.data
        grid = Grid(size, np.eye(4))
        corner = torch.zeros(1, dtype=torch.int32)
        self._sample = Sample(
            name="made",
            image=torch.zeros(recipe.stored_channels, *size, dtype=getattr(torch, data.storage_dtype)),
            label=torch.zeros(1, *size, dtype=LABEL_TYPES[recipe.task_facts.label_bytes]),
            centres=(corner,) * recipe.centre_lists,
            background_centres=None if recipe.patch.background_above is None else corner,
            grid=grid,
            source_grid=grid,
        )

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return self._sample

    def close(self) -> None:
        """Nothing is held."""
