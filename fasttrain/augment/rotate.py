"""Owns rotation about the patch's centre, by an angle an axis."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import RotateSpec


class Rotate:
    """Angles are drawn from ±`degrees` for each axis (one in 2D); the rotations are taken one after another, in voxels."""

    def __init__(self, spec: RotateSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, generator: torch.Generator) -> Draw:
        """matrix: a rotation, or the identity where it does not happen."""
        active = happens(self.spec.probability, generator)
        limit = math.radians(self.spec.degrees)
        angles = uniform(-limit, limit, (3 if dimensions == 3 else 1,), generator)
        matrix = torch.eye(dimensions)
        if active:
            for plane, angle in zip(_PLANES[dimensions], angles.tolist(), strict=True):
                matrix = matrix @ _rotation(dimensions, plane, angle)
        return {"active": active, "matrix": matrix}


_PLANES = {2: [(0, 1)], 3: [(1, 2), (0, 2), (0, 1)]}


def _rotation(dimensions: int, plane: tuple[int, int], angle: float) -> Tensor:
    matrix = torch.eye(dimensions)
    first, second = plane
    matrix[first, first] = matrix[second, second] = math.cos(angle)
    matrix[first, second], matrix[second, first] = -math.sin(angle), math.sin(angle)
    return matrix
