"""Owns rotation about the patch's centre, by an angle an axis."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fasttrain.augment.chances import Chances
from fasttrain.augment.technique import Draw, happens, uniform
from fasttrain.recipe.augment_spec import RotateSpec


class Rotate:
    """Angles are drawn from ±`degrees` for each axis (one in 2D); the rotations are taken one after another, in voxels."""

    name = "rotate"

    def __init__(self, spec: RotateSpec) -> None:
        self.spec = spec

    def draw(self, dimensions: int, chances: Chances) -> Draw:
        """matrix: [sample, d, d], a rotation, or the identity where it does not happen."""
        planes = _PLANES[dimensions]
        values = chances(self.name, 1 + len(planes))
        active = happens(self.spec.probability, values[:, 0])
        limit = math.radians(self.spec.degrees)
        angles = uniform(-limit, limit, values[:, 1:]) * active[:, None]
        return {"active": active, "matrix": _rotations(dimensions, planes, angles.double().numpy())}


_PLANES = {2: [(0, 1)], 3: [(1, 2), (0, 2), (0, 1)]}


def _rotations(dimensions: int, planes: list[tuple[int, int]], angles: np.ndarray) -> Tensor:
    """angles: [sample, plane]. In float64, whose last bits, which differ between ways to compute a cosine, are rounded away."""
    cos, sin = np.cos(angles)[..., None], np.sin(angles)[..., None]
    product = np.tile(np.eye(dimensions), (len(angles), 1, 1))
    for number, (first, second) in enumerate(planes):
        # A turn in one plane mixes two columns only
        one, other = product[:, :, first].copy(), product[:, :, second].copy()
        product[:, :, first] = one * cos[:, number] + other * sin[:, number]
        product[:, :, second] = other * cos[:, number] - one * sin[:, number]
    return torch.from_numpy(product.astype(np.float32))
