"""Owns the order of augmentation and its two halves: all draws of a sample, and their application to a batch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fasttrain.augment.blur import Blur
from fasttrain.augment.brightness import Brightness
from fasttrain.augment.contrast import Contrast
from fasttrain.augment.elastic import Elastic
from fasttrain.augment.flip import Flip
from fasttrain.augment.gamma import Gamma
from fasttrain.augment.gamma_inverted import GammaInverted
from fasttrain.augment.low_resolution import LowResolution
from fasttrain.augment.noise import Noise
from fasttrain.augment.resample import Displacement, resample
from fasttrain.augment.rotate import Rotate
from fasttrain.augment.scale import Scale
from fasttrain.augment.scale_intensity import ScaleIntensity
from fasttrain.augment.shift_intensity import ShiftIntensity
from fasttrain.augment.technique import Draw, IntensityTechnique, SpatialTechnique
from fasttrain.recipe.augment_spec import AugmentSpec

SPATIAL: dict[str, type] = {"rotate": Rotate, "scale": Scale}
INTENSITY: dict[str, type] = {
    "noise": Noise,
    "blur": Blur,
    "shift_intensity": ShiftIntensity,
    "scale_intensity": ScaleIntensity,
    "brightness": Brightness,
    "contrast": Contrast,
    "low_resolution": LowResolution,
    "gamma_inverted": GammaInverted,
    "gamma": Gamma,
}
IN_SEQUENCE = ("noise", "shift_intensity", "scale_intensity", "gamma")
"""Drawn one after another from the sample's generator, after SPATIAL and flip: recorded runs depend on it. Every other technique
has a generator of its own, so that to add one changes no draw of any other."""

Draws = dict[str, Draw]
"""By technique: the parameters of one sample, or of a batch."""


class Augmenter:
    """Linear maps and elastic deformation in one resampling, then mirroring, then intensity in the order of `INTENSITY`.

    That is nnU-Net's order but for mirroring, its last step. No technique after it knows left from right, so that patches are
    spread alike.
    """

    def __init__(self, spec: AugmentSpec) -> None:
        self.flip = Flip(spec.flip) if spec.flip is not None else None
        self.elastic = Elastic(spec.elastic) if spec.elastic is not None else None
        self.spatial: dict[str, SpatialTechnique] = _chosen(SPATIAL, spec)
        self.intensity: dict[str, IntensityTechnique] = _chosen(INTENSITY, spec)

    def draw(self, dimensions: int, channels: int, generator: torch.Generator) -> Draws:
        """All parameters of one sample. What is not in the recipe draws nothing."""
        draws: Draws = {name: technique.draw(dimensions, generator) for name, technique in self.spatial.items()}
        if self.flip is not None:
            draws["flip"] = self.flip.draw(generator)
        draws.update(
            {name: self.intensity[name].draw(channels, generator) for name in IN_SEQUENCE if name in self.intensity}
        )
        alone = [name for name in self.intensity if name not in IN_SEQUENCE]
        if alone or self.elastic is not None:
            seed = int(torch.randint(2**62, (), generator=generator))
            draws.update({name: self.intensity[name].draw(channels, _generator(seed, name)) for name in alone})
            if self.elastic is not None:
                draws["elastic"] = self.elastic.draw(dimensions, _generator(seed, "elastic"))
        return draws

    def apply(self, image: Tensor, label: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """image: [sample, channel, *spatial] float32; label: [sample, 1, *spatial] uint8; both may be changed in place.

        `draws` are those of the batch (see `stack`), on the CPU: which samples a technique touches is known without asking
        the device.
        """
        if self.spatial or self.elastic is not None:
            self._resample(image, label, draws)
        if self.flip is not None:
            image, label = self.flip.apply(image, draws["flip"]), self.flip.apply(label, draws["flip"])
        for name, technique in self.intensity.items():
            chosen = draws[name]["active"].nonzero().flatten()
            if len(chosen):
                place = chosen.to(image.device, non_blocking=True)
                theirs = {key: value[chosen] for key, value in draws[name].items()}
                image[place] = technique.apply(image[place], theirs)
        return image, label

    def _resample(self, image: Tensor, label: Tensor, draws: Draws) -> None:
        """Changes the samples that move, and no others, in place."""
        dimensions = image.dim() - 2
        active = torch.zeros(len(image), dtype=torch.bool)
        matrix = torch.eye(dimensions).expand(len(image), -1, -1)
        for name in self.spatial:
            active = active | draws[name]["active"]
            matrix = matrix @ draws[name]["matrix"]
        bent = draws["elastic"]["active"] if self.elastic is not None else torch.zeros_like(active)
        chosen = (active | bent).nonzero().flatten()
        if len(chosen) == 0:
            return
        displacement = None
        if self.elastic is not None and bent.any():
            theirs = {key: value[bent] for key, value in draws["elastic"].items()}
            field = self.elastic.displacement(theirs, image.shape[2:], image.device)
            displacement = Displacement(bent[chosen].nonzero().flatten(), field)
        place = chosen.to(image.device, non_blocking=True)
        image[place], label[place] = resample(image[place], label[place], matrix[chosen], displacement)


def stack(draws: list[Draws]) -> Draws:
    """The draws of single samples as the draws of a batch, along a first axis."""
    return {name: {key: torch.stack([one[name][key] for one in draws]) for key in draws[0][name]} for name in draws[0]}


def _chosen(table: dict[str, type], spec: AugmentSpec) -> dict:
    return {name: kind(getattr(spec, name)) for name, kind in table.items() if getattr(spec, name) is not None}


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
