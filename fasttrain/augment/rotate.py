"""Owns rotation about the patch's centre, by an angle an axis."""

from __future__ import annotations

import math

import numpy as np

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, drawn, happens, uniform
from fasttrain.recipe.augment_spec import RotateSpec


class Rotate:
    """Angles are drawn from ±`degrees` for each axis (one in 2D); the rotations are taken one after another, in voxels."""

    name = "rotate"

    def __init__(self, spec: RotateSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """matrix: [sample, d, d], a rotation, or the identity where it does not happen."""
        planes = _PLANES[dimensions]
        values = chances.numbers(self.name, 1 + len(planes))
        active = happens(self.spec.probability, values[:, 0])
        limit = math.radians(self.spec.degrees)
        angles = uniform(-limit, limit, values[:, 1:]) * active[:, None]
        return drawn(active=active, matrix=_rotations(dimensions, planes, angles.astype(np.float64)))


_PLANES = {2: [(0, 1)], 3: [(1, 2), (0, 2), (0, 1)]}


def _rotations(dimensions: int, planes: list[tuple[int, int]], angles: np.ndarray) -> np.ndarray:
    """angles: [sample, plane]. In float64, whose last bits, which differ between ways to compute a cosine, are rounded away."""
    cos, sin = np.cos(angles).T, np.sin(angles).T
    turns = np.zeros((len(planes), len(angles), dimensions, dimensions))
    for number, (first, second) in enumerate(planes):
        turn = turns[number]
        for axis in range(dimensions):
            turn[:, axis, axis] = cos[number] if axis in (first, second) else 1.0
        turn[:, second, first] = sin[number]
        turn[:, first, second] = -sin[number]
    product = turns[0]
    for turn in turns[1:]:
        product = product @ turn
    return product.astype(np.float32)
