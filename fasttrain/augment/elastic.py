"""Owns elastic deformation: smooth displacements that share the one resampling with the linear maps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, sent, uniform
from fasttrain.recipe.augment_spec import ElasticSpec


class Elastic:
    """A uniform cubic B-spline over the patch (Rueckert's free-form deformation); its control points are drawn.

    Displacements lie within the span of the points' own, and points move so little that no fold can arise (see the spec).
    """

    name = "elastic"

    def __init__(self, spec: ElasticSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """points: [sample, d, *control points], displacements as shares of the patch's length along each of its d axes;
        0 where it does not happen."""
        shape = (dimensions, *(self.spec.cells + 3,) * dimensions)
        active = happens(self.spec.probability, chances.numbers(self.name, 1)[:, 0])
        points = np.zeros((len(chances), *shape), dtype=np.float32)
        if active.any():
            # A thousand numbers a sample take longer to draw than all others together
            values = chances[active].numbers(self.name, 1 + math.prod(shape))[:, 1:]
            points[active] = uniform(-self.spec.magnitude, self.spec.magnitude, values).reshape(-1, *shape)
        return drawn(active=active, points=points)

    def displacement(self, draw: Draw, size: Sequence[int], device: torch.device) -> Tensor:
        """[sample, d, *size] float32 in voxels, for the samples of `draw`."""
        field = sent(draw["points"], device)
        # The last axis first: while the field is small, so that the large steps read whole rows
        for axis in reversed(range(len(size))):
            field = _refined(field, axis + 2, size[axis], self.spec.cells)
        lengths = torch.tensor(size, dtype=field.dtype).reshape(-1, *(1,) * len(size))
        return field.mul_(sent(lengths, device))


def _refined(field: Tensor, axis: int, length: int, cells: int) -> Tensor:
    """The spline's values at `length` voxel centres along `axis`, which has cells + 3 control points.

    Sums of weighted slices and no matrix product: with TF32 that would be off by hundredths of a voxel.
    """
    place = (torch.arange(length, device=field.device) + 0.5) * (cells / length)
    cell = place.floor().clamp_(0, cells - 1)
    t = place - cell
    first = cell.long()
    weights = [(1 - t) ** 3 / 6, t**3 / 2 - t**2 + 2 / 3, (t + t**2 - t**3) / 2 + 1 / 6, t**3 / 6]
    shape = [1] * field.dim()
    shape[axis] = length
    total = field.index_select(axis, first).mul_(weights[0].reshape(shape))
    for number in range(1, 4):
        total.addcmul_(field.index_select(axis, first + number), weights[number].reshape(shape))
    return total
