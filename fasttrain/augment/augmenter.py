"""Owns the order of augmentation and its two halves: all draws of a batch, and their application to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.augment.blur import Blur
from fasttrain.augment.brightness import Brightness
from fasttrain.augment.chances import Chances
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
from fasttrain.augment.technique import Draw, IntensityTechnique, SpatialTechnique, per_sample, sent
from fasttrain.kernels import intensity
from fasttrain.kernels.intensity_table import Chain, Rows
from fasttrain.kernels.rows import kernels_take
from fasttrain.kernels.structure_bits import change_sides
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
Draws = dict[str, Draw]
"""By technique: the parameters of a batch."""

_CPU = torch.device("cpu")
_SEED_STEP = 0x9E3779B97F4A7
"""Keeps the seeds of a sample's slices apart from one another."""


class Augmenter:
    """Linear maps and elastic deformation in one resampling, then mirroring, then intensity in the order of `INTENSITY`.

    That is nnU-Net's order but for mirroring, its last step. No technique after it knows left from right, so that patches are
    spread alike.
    """

    def __init__(
        self,
        spec: AugmentSpec,
        shaded: int | None = None,
        left_right_axis: int | None = None,
        sides: tuple[tuple[int, int], ...] = (),
        depth: int = 1,
    ) -> None:
        """shaded: so many channels, the first ones, change their intensities (None: all); the others are only moved. sides:
        bits of the label, (left, right), that change places where a sample is mirrored along `left_right_axis`. depth: the
        slices of a sample, whose channels lie behind one another.
        """
        self._depth = depth
        self._shaded = shaded
        self._left_right = left_right_axis
        self._sides = sides
        self.flip = Flip(spec.flip) if spec.flip is not None else None
        self.elastic = Elastic(spec.elastic) if spec.elastic is not None else None
        self.spatial: dict[str, SpatialTechnique] = _chosen(SPATIAL, spec)
        self.intensity: dict[str, IntensityTechnique] = _chosen(INTENSITY, spec)
        self.chain = _chain(spec)

    def draw(self, dimensions: int, channels: int, chances: Chances) -> Draws:
        """All parameters of the samples of `chances`. What is not in the recipe draws nothing."""
        chances.make_ready(self._asked(dimensions, channels))
        draws: Draws = {name: technique.draw(dimensions, chances) for name, technique in self.spatial.items()}
        if self.elastic is not None:
            draws["elastic"] = self.elastic.draw(dimensions, chances)
        if self.flip is not None:
            draws["flip"] = self.flip.draw(dimensions, chances)
        draws.update({name: technique.draw(channels, chances) for name, technique in self.intensity.items()})
        return draws

    def _asked(self, dimensions: int, channels: int) -> tuple[tuple[str, int], ...]:
        """Numbers enough for every technique but elastic, whose points are many; to draw too many is cheaper than often."""
        moves = [*self.spatial, *(["flip"] if self.flip is not None else [])]
        bends = [("elastic", 1)] if self.elastic is not None else []
        return (
            *((name, 1 + dimensions) for name in moves),
            *bends,
            *((name, 1 + 4 * channels) for name in self.intensity),
        )

    def apply(self, image: Tensor, label: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """image: [sample, channel, *spatial] float32; label: [sample, 1, *spatial] uint8; both may be changed in place.

        `draws` lie on the CPU: which samples a technique touches is known without asking the device.
        """
        if self.spatial or self.elastic is not None:
            self._resample(image, label, draws)
        if self.flip is not None:
            image, label = self.flip.apply(image, draws["flip"]), self.flip.apply(label, draws["flip"])
        if self._depth == 1:
            return self.apply_intensity(image, draws), self.with_sides(label, draws)
        slices = self.apply_intensity(image.unflatten(1, (self._depth, -1)).flatten(0, 1), draws)
        return slices.unflatten(0, (-1, self._depth)).flatten(1, 2), self.with_sides(label, draws)

    def with_sides(self, label: Tensor, draws: Draws) -> Tensor:
        """The label [sample, 1, *spatial] of samples that were mirrored, its left and right structures called by their new
        sides.
        """
        if (
            self.flip is None
            or self._left_right is None
            or self._left_right not in self.flip.spec.axes
            or not self._sides
        ):
            return label
        mirrored = draws["flip"]["mirrored"][:, self._left_right].contiguous()
        return change_sides(label, sent(mirrored, label.device), self._sides)

    def linear(
        self, draws: Draws, count: int, size: Sequence[int], device: torch.device = _CPU
    ) -> tuple[Tensor, Displacement | None]:
        """Where `count` patches of `size` are to be read, for a source that cuts and resamples in one.

        matrix: [count, d, d] float32 on the CPU, mirroring included; the displacement's field is on `device`. A voxel at offset x
        from the patch's centre looks at matrix · (x + displacement(x)). Followed by `apply_intensity` this is what `apply` does.
        """
        matrix, displacement = self._matrix(draws, count, len(size)), self._displacement(draws, size, device)
        if self.flip is None:
            return matrix, displacement
        # With S the mirroring: the mirrored patch reads M (S x + u(S x)) at x, which is M S (x + S u(S x))
        signs = self.flip.signs(draws["flip"])
        if displacement is not None:
            theirs = {"mirrored": draws["flip"]["mirrored"][displacement.rows]}
            field = self.flip.apply(displacement.field, theirs)
            field *= per_sample(sent(signs[displacement.rows], device), field)
        return matrix * signs[:, None, :], displacement

    def table(self, draws: Draws, channels: int, size: Sequence[int]) -> Tensor:
        """What `apply_table` must know of `draws`: int32 [sample, k] on the CPU; k is 0 where the recipe changes no intensity."""
        if not self.intensity:
            return torch.empty((0, 0), dtype=torch.int32)
        rows = Rows.empty(len(draws[next(iter(self.intensity))]["active"]), channels)
        for name, technique in self.intensity.items():
            technique.write(rows, draws[name], size)
        return rows.tensor()

    def apply_table(self, image: Tensor, table: Tensor) -> Tensor:
        """What `apply_intensity` does, changing the image in place, by a table beside it: a fixed sequence of launches.

        Nothing is read back and no launch depends on what was drawn, so that a CUDA graph may hold it.
        """
        return intensity.apply(image, table, self.chain) if self.intensity else image

    def apply_intensity(self, image: Tensor, draws: Draws) -> Tensor:
        """All that comes after the moves of voxels; image: [sample, channel, *spatial] float32, may be changed in place.

        Where a sample has several slices, [sample · slice, channel, *spatial]: those of one change alike, with a noise of each
        one's own.
        """
        if self._depth > 1:
            draws = {name: self._of_slices(draw) for name, draw in draws.items() if name in self.intensity}
        if self._shaded is None or self._shaded == image.shape[1] or not self.intensity:
            return self._shade(image, draws)
        layout = torch.channels_last_3d if image.dim() == 5 else torch.channels_last
        image[:, : self._shaded] = self._shade(image[:, : self._shaded].contiguous(memory_format=layout), draws)
        return image

    def _of_slices(self, draw: Draw) -> Draw:
        """The draw of each sample for each of its slices."""
        repeated = {key: value.repeat_interleave(self._depth, 0) for key, value in draw.items()}
        if "seed" in repeated:
            steps = torch.arange(self._depth).repeat(len(draw["seed"]))
            repeated["seed"] = repeated["seed"] ^ (steps * _SEED_STEP)
        return repeated

    def _shade(self, image: Tensor, draws: Draws) -> Tensor:
        if self.intensity and kernels_take(image):
            table = self.table(draws, image.shape[1], image.shape[2:])
            return self.apply_table(image, sent(table, image.device))
        for name, technique in self.intensity.items():
            chosen = draws[name]["active"].nonzero().flatten()
            if len(chosen):
                place = sent(chosen, image.device)
                theirs = {key: value[chosen] for key, value in draws[name].items()}
                image[place] = technique.apply(image[place], theirs)
        return image

    def _resample(self, image: Tensor, label: Tensor, draws: Draws) -> None:
        """Changes the samples that move, and no others, in place."""
        active = torch.zeros(len(image), dtype=torch.bool)
        for name in self.spatial:
            active |= draws[name]["active"]
        displacement = self._displacement(draws, image.shape[2:], image.device)
        if displacement is not None:
            bent = draws["elastic"]["active"]
            active |= bent
            displacement = Displacement(bent[active].nonzero().flatten(), displacement.field)
        chosen = active.nonzero().flatten()
        if len(chosen) == 0:
            return
        matrix = self._matrix(draws, len(image), image.dim() - 2)
        place = sent(chosen, image.device)
        image[place], label[place] = resample(image[place], label[place], matrix[chosen], displacement)

    def _matrix(self, draws: Draws, count: int, dimensions: int) -> Tensor:
        matrix = torch.eye(dimensions).repeat(count, 1, 1)
        for name in self.spatial:
            matrix = matrix @ draws[name]["matrix"]
        return matrix

    def _displacement(self, draws: Draws, size: Sequence[int], device: torch.device) -> Displacement | None:
        """That of the samples that bend; None where none does."""
        if self.elastic is None or not draws["elastic"]["active"].any():
            return None
        bent = draws["elastic"]["active"]
        theirs = {key: value[bent] for key, value in draws["elastic"].items()}
        return Displacement(bent.nonzero().flatten(), self.elastic.displacement(theirs, size, device))


def _chain(spec: AugmentSpec) -> Chain:
    return Chain(
        noise=spec.noise is not None,
        blur_radius=0 if spec.blur is None else Blur(spec.blur).radius,
        shade=any(one is not None for one in (spec.shift_intensity, spec.scale_intensity, spec.brightness)),
        contrast=spec.contrast is not None,
        clips=spec.contrast is not None and spec.contrast.preserve_range,
        low_resolution=spec.low_resolution is not None,
        gamma_inverted=None if spec.gamma_inverted is None else spec.gamma_inverted.retain_stats,
        gamma=None if spec.gamma is None else spec.gamma.retain_stats,
    )


def _chosen(table: dict[str, type], spec: AugmentSpec) -> dict:
    return {name: kind(getattr(spec, name)) for name, kind in table.items() if getattr(spec, name) is not None}
