"""Owns zooming about the patch's centre, by one factor for all axes."""

from __future__ import annotations

import torch

from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import ScaleSpec


class Scale:
    """A factor above 1 magnifies: the output looks at a smaller part of the input."""

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, generator: torch.Generator) -> Draw:
        """matrix: 1/factor on the diagonal, or the identity where it does not happen."""
        active = happens(self.spec.probability, generator)
        factor = uniform(self.spec.low, self.spec.high, (), generator)
        return {"active": active, "matrix": torch.eye(dimensions) / (factor if active else 1.0)}
