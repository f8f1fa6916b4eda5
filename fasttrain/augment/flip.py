"""Owns mirroring: an exact move of voxels, never a resampling."""

from __future__ import annotations

from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, sent
from fasttrain.recipe.augment_spec import FlipSpec


class Flip:
    """Each of the spec's axes is mirrored by itself with its probability."""

    name = "flip"

    def __init__(self, spec: FlipSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """mirrored: bool [sample, d]; never along an axis that the spec does not name."""
        mirrored = happens(self.spec.probability, chances.numbers(self.name, dimensions))
        for axis in set(range(dimensions)) - set(self.spec.axes):
            mirrored[:, axis] = False
        return drawn(mirrored=mirrored)

    def signs(self, draw: Draw) -> Tensor:
        """[sample, d] float32: −1 along each axis that is mirrored, 1 elsewhere."""
        return 1.0 - 2.0 * draw["mirrored"].float()

    def apply(self, volume: Tensor, draw: Draw) -> Tensor:
        """volume: [sample, channel, *spatial], image or label; changed in place and returned."""
        for axis in self.spec.axes:
            chosen = draw["mirrored"][:, axis].nonzero().flatten()
            if len(chosen):
                chosen = sent(chosen, volume.device)
                volume[chosen] = volume[chosen].flip(axis + 2)
        return volume
