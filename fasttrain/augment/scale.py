"""Owns zooming about the patch's centre, by one factor for all axes."""

from __future__ import annotations

import numpy as np

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, uniform
from fasttrain.recipe.augment_spec import ScaleSpec


class Scale:
    """A factor above 1 magnifies: the output looks at a smaller part of the input."""

    name = "scale"

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """matrix: [sample, d, d], 1/factor on the diagonal, or the identity where it does not happen."""
        values = chances.numbers(self.name, 2)
        active = happens(self.spec.probability, values[:, 0])
        factor = np.where(active, uniform(self.spec.low, self.spec.high, values[:, 1]), np.float32(1.0))
        return drawn(active=active, matrix=np.eye(dimensions, dtype=np.float32) / factor[:, None, None])
