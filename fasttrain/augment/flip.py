"""Owns mirroring: an exact move of voxels, never a resampling."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw
from fasttrain.recipe.augment_spec import FlipSpec


class Flip:
    """Each of the spec's axes is mirrored by itself with its probability."""

    def __init__(self, spec: FlipSpec) -> None:
        self.spec = spec

    def draw(self, generator: torch.Generator) -> Draw:
        """mirrored: bool [axes of the spec]."""
        return {"mirrored": torch.rand(len(self.spec.axes), generator=generator) < self.spec.probability}

    def apply(self, volume: Tensor, draw: Draw) -> Tensor:
        """volume: [sample, channel, *spatial], image or label; changed in place and returned."""
        for number, axis in enumerate(self.spec.axes):
            chosen = draw["mirrored"][:, number].nonzero().flatten()
            if len(chosen):
                chosen = chosen.to(volume.device, non_blocking=True)
                volume[chosen] = volume[chosen].flip(axis + 2)
        return volume
