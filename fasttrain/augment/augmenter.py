"""Owns the order of augmentation and its two halves: all draws of a sample, and their application to a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.augment.flip import Flip
from fasttrain.augment.gamma import Gamma
from fasttrain.augment.noise import Noise
from fasttrain.augment.resample import resample
from fasttrain.augment.rotate import Rotate
from fasttrain.augment.scale import Scale
from fasttrain.augment.scale_intensity import ScaleIntensity
from fasttrain.augment.shift_intensity import ShiftIntensity
from fasttrain.augment.technique import Draw, IntensityTechnique, SpatialTechnique
from fasttrain.recipe.augment_spec import AugmentSpec

SPATIAL: dict[str, type] = {"rotate": Rotate, "scale": Scale}
INTENSITY: dict[str, type] = {
    "noise": Noise,
    "shift_intensity": ShiftIntensity,
    "scale_intensity": ScaleIntensity,
    "gamma": Gamma,
}

Draws = dict[str, Draw]
"""By technique: the parameters of one sample, or of a batch."""


class Augmenter:
    """Linear maps in one resampling, then mirroring, then intensity in the order of `INTENSITY`."""

    def __init__(self, spec: AugmentSpec) -> None:
        self.flip = Flip(spec.flip) if spec.flip is not None else None
        self.spatial: dict[str, SpatialTechnique] = _chosen(SPATIAL, spec)
        self.intensity: dict[str, IntensityTechnique] = _chosen(INTENSITY, spec)

    def draw(self, dimensions: int, channels: int, generator: torch.Generator) -> Draws:
        """All parameters of one sample."""
        draws: Draws = {name: technique.draw(dimensions, generator) for name, technique in self.spatial.items()}
        if self.flip is not None:
            draws["flip"] = self.flip.draw(generator)
        draws.update({name: technique.draw(channels, generator) for name, technique in self.intensity.items()})
        return draws

    def apply(self, image: Tensor, label: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """image: [sample, channel, *spatial] float32; label: [sample, 1, *spatial] uint8; both may be changed in place.

        `draws` are those of the batch (see `stack`), on the CPU: which samples a technique touches is known without asking
        the device.
        """
        if self.spatial:
            active = torch.stack([draws[name]["active"] for name in self.spatial]).any(0)
            matrix = draws[next(iter(self.spatial))]["matrix"]
            for name in list(self.spatial)[1:]:
                matrix = matrix @ draws[name]["matrix"]
            chosen = active.nonzero().flatten()
            if len(chosen):
                place = chosen.to(image.device, non_blocking=True)
                image[place], label[place] = resample(image[place], label[place], matrix[chosen])
        if self.flip is not None:
            image, label = self.flip.apply(image, draws["flip"]), self.flip.apply(label, draws["flip"])
        for name, technique in self.intensity.items():
            chosen = draws[name]["active"].nonzero().flatten()
            if len(chosen):
                place = chosen.to(image.device, non_blocking=True)
                theirs = {key: value[chosen] for key, value in draws[name].items()}
                image[place] = technique.apply(image[place], theirs)
        return image, label


def stack(draws: list[Draws]) -> Draws:
    """The draws of single samples as the draws of a batch, along a first axis."""
    return {name: {key: torch.stack([one[name][key] for one in draws]) for key in draws[0][name]} for name in draws[0]}


def _chosen(table: dict[str, type], spec: AugmentSpec) -> dict:
    return {name: kind(getattr(spec, name)) for name, kind in table.items() if getattr(spec, name) is not None}
