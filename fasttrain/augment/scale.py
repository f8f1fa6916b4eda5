"""Owns zooming about the patch's centre, by one factor for all axes."""

from __future__ import annotations

import torch

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import ScaleSpec


class Scale:
    """A factor above 1 magnifies: the output looks at a smaller part of the input."""

    name = "scale"

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """matrix: [sample, d, d], 1/factor on the diagonal, or the identity where it does not happen."""
        values = chances(self.name, 2)
        active = happens(self.spec.probability, values[:, 0])
        factor = torch.where(active, uniform(self.spec.low, self.spec.high, values[:, 1]), 1.0)
        return {"active": active, "matrix": torch.eye(dimensions) / factor[:, None, None]}
