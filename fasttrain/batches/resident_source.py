"""Owns batches of volumes that lie in GPU memory: patches are cut, moved and augmented there.

What is drawn is what `LoaderSource` draws at the same position, by the same code; one table of numbers a batch goes to the
device, by way of pinned memory, and nothing comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fasttrain.augment.technique import sent
from fasttrain.batches.crop import CaseCentres, CentreTables
from fasttrain.batches.order import Order
from fasttrain.batches.patch_maker import Drawn, PatchMaker
from fasttrain.kernels.patches import Volumes, cut
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, CaseSource

_AXES = 3
_NUMBERS = 1 + _AXES + _AXES * _AXES


class ResidentSource:
    """A BatchSource over volumes that are copied to `device` once. `source` is closed when they are there."""

    waited_for = False

    def __init__(
        self,
        recipe: Recipe,
        source: CaseSource,
        order: Order,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.maker = PatchMaker(recipe, source, order)
        self.device = device
        self.volumes: Volumes | None
        self.volumes, self.tables, self._names = _copied(source, device, progress)
        source.close()

    def batches(self, first_position: int) -> Iterator[Batch]:
        """Batches from a position on, for ever."""
        position = first_position
        while True:
            yield self._batch(self.maker.draw(position, self.tables))
            position += self.maker.batch_size

    def close(self) -> None:
        """Gives the memory back."""
        self.volumes = None

    def _batch(self, drawn: Drawn) -> Batch:
        assert self.volumes is not None
        size, augmenter = self.maker.patch.size, self.maker.augmenter
        matrix, bent = augmenter.linear(drawn.draws, len(drawn.cases), size, self.device)
        displacement = None
        if bent is not None:
            displacement = bent.field.new_zeros((len(drawn.cases), *bent.field.shape[1:]))
            displacement[sent(bent.rows, self.device)] = bent.field
            displacement = _in_three(displacement)
        numbers = sent(torch.from_numpy(_numbers(drawn, matrix)), self.device)
        image, label = cut(
            self.volumes,
            numbers[:, 0],
            numbers[:, 1 : 1 + _AXES],
            numbers[:, 1 + _AXES :].view(torch.float32).unflatten(1, (_AXES, _AXES)),
            (1,) * (_AXES - len(size)) + tuple(size),
            displacement,
        )
        if len(size) < _AXES:
            image, label = image.squeeze(2), label.squeeze(2)
        image = augmenter.apply_intensity(image, drawn.draws)
        return Batch(image, label, drawn.positions, tuple(self._names[case] for case in drawn.cases.tolist()))


def _copied(
    source: CaseSource, device: torch.device, progress: Callable[[int, int], None]
) -> tuple[Volumes, CentreTables, list[str]]:
    """The volumes on the device, one after another, and what draws need of them on the host."""
    samples = [source[index] for index in range(len(source))]
    lengths = [(1,) * (_AXES + 1 - sample.image.ndim) + tuple(sample.image.shape[1:]) for sample in samples]
    voxels = np.prod(np.array(lengths, dtype=np.int64), axis=1)
    places = np.cumsum(voxels) - voxels
    total, first_image = int(voxels.sum()), samples[0].image
    channels = first_image.shape[0]
    images = torch.empty(total * channels, dtype=first_image.dtype, device=device)
    labels = torch.empty(total, dtype=torch.uint8, device=device)
    for number, (sample, first, length) in enumerate(zip(samples, places.tolist(), voxels.tolist(), strict=True), 1):
        assert sample.label is not None
        images[first * channels : (first + length) * channels] = sample.image.movedim(0, -1).reshape(-1).to(device)
        labels[first : first + length] = sample.label.reshape(-1).to(device)
        progress(number, len(samples))
    volumes = Volumes(
        images,
        labels,
        torch.from_numpy(places).to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        channels,
    )
    return volumes, CentreTables(map(CaseCentres.of, samples)), [sample.name for sample in samples]


def _numbers(drawn: Drawn, matrix: torch.Tensor) -> np.ndarray:
    """int32 [sample, 13]: the case, the first voxel, and the bits of the matrix, all in three axes."""
    count, dimensions = drawn.corners.shape
    numbers = np.zeros((count, _NUMBERS), dtype=np.int32)
    numbers[:, 0] = drawn.cases
    numbers[:, 1 + _AXES - dimensions : 1 + _AXES] = drawn.corners
    whole = np.broadcast_to(np.eye(_AXES, dtype=np.float32), (count, _AXES, _AXES)).copy()
    whole[:, _AXES - dimensions :, _AXES - dimensions :] = matrix.numpy()
    numbers[:, 1 + _AXES :] = whole.reshape(count, -1).view(np.int32)
    return numbers


def _in_three(displacement: torch.Tensor) -> torch.Tensor:
    """[sample, d, *spatial] as [sample, 3, *three axes]: a plane's voxels are not moved out of it."""
    if displacement.shape[1] == _AXES:
        return displacement.contiguous()
    flat = displacement.unsqueeze(2)
    return torch.cat([torch.zeros_like(flat[:, :1]), flat], 1).contiguous()
