"""Owns batches of volumes that lie in GPU memory: patches are cut, moved and augmented there.

What is drawn is what `LoaderSource` draws at the same position, by the same code; one table of numbers a batch goes to the
device, by way of pinned memory, and nothing comes back. Of cases that the device has no room for, the boxes that patches need are
copied there first (`boxes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from fasttrain.augment.technique import sent
from fasttrain.batches.boxes import BoxStream, DeviceSlots
from fasttrain.batches.device_room import AXES, in_three_axes
from fasttrain.batches.order import Order, turns
from fasttrain.batches.patch_maker import Drawn, PatchMaker
from fasttrain.batches.resident_volumes import Resident
from fasttrain.kernels.patches import cut
from fasttrain.machine.place import ALONE, Place
from fasttrain.ranges import part
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch

_NUMBERS = 1 + AXES + AXES * AXES


class ResidentSource:
    """A BatchSource over the volumes of `resident`. `threads` cut the boxes of cases that stayed on the host.
    place: of several ranks each makes the batches whose turn it is.

    waited_for: False but after a batch whose boxes were not there yet when it was asked for.
    """

    def __init__(
        self,
        recipe: Recipe,
        resident: Resident,
        order: Order,
        device: torch.device,
        threads: int = 2,
        place: Place = ALONE,
    ) -> None:
        self.place = place
        self.maker = PatchMaker(recipe, None, order)
        self.device = device
        self.waited_for = False
        self.resident: Resident | None = resident
        self._threads = threads
        self._boxes: BoxStream | None = None

    def batches(self, first_position: int, alike: bool = False) -> Iterator[Batch]:
        """Batches from a position on, for ever; `alike`: the same ones on every rank."""
        assert self.resident is not None
        positions = turns(first_position, self.maker.batch_size, ALONE if alike else self.place)
        if self.resident.rest:
            yield from self._streamed(self.resident, positions)
            return
        for position in positions:
            drawn = self.maker.draw(position, self.resident.tables)
            yield self._batch(self.resident, drawn, self._names(self.resident, drawn))

    def close(self) -> None:
        """Gives the memory back."""
        self._end_boxes()
        resident, self.resident = self.resident, None
        if resident is not None:
            resident.close()

    def _streamed(self, resident: Resident, positions: Iterator[int]) -> Iterator[Batch]:
        """The next batch's boxes are copied while this one's step runs."""
        self._end_boxes()
        boxes = self._boxes = BoxStream(self.maker, resident, positions, self._threads)
        slots = DeviceSlots(resident, self.maker.batch_size, self.maker.reach)
        coming = slots.begin(next(boxes))
        while True:
            self.waited_for = not boxes.ready
            placed, coming = coming, slots.begin(next(boxes))
            slots.await_copy(placed)
            batch = self._batch(resident, placed.drawn(), self._names(resident, placed.boxed.drawn))
            slots.give_back(placed)
            yield batch

    def _end_boxes(self) -> None:
        if self._boxes is None:
            return
        self._boxes.close()
        self._boxes = None
        if self.device.type == "cuda":
            # A copy that is still on its way would write to memory that is another's by then; a GPU that failed answers no more
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.device)

    @staticmethod
    def _names(resident: Resident, drawn: Drawn) -> tuple[str, ...]:
        return tuple(resident.names[case] for case in drawn.cases.tolist())

    def _batch(self, resident: Resident, drawn: Drawn, names: tuple[str, ...]) -> Batch:
        size, augmenter, depth = self.maker.patch.size, self.maker.augmenter, 2 * self.maker.neighbours + 1
        matrix, bent = augmenter.linear(drawn.draws, len(drawn.cases), size, self.device)
        displacement = None
        if bent is not None:
            displacement = bent.field.new_zeros((len(drawn.cases), *bent.field.shape[1:]))
            displacement[sent(bent.rows, self.device)] = bent.field
            displacement = _in_three(displacement)
            if depth > 1:
                displacement = displacement.repeat_interleave(depth, 0)
        numbers = sent(torch.from_numpy(self._of_slices(resident, _numbers(drawn, matrix))), self.device)
        with part("cut"):
            image, label = cut(
                resident.volumes,
                numbers[:, 0],
                numbers[:, 1 : 1 + AXES],
                numbers[:, 1 + AXES :].view(torch.float32).unflatten(1, (AXES, AXES)),
                in_three_axes(tuple(size)),
                displacement,
            )
        if len(size) < AXES:
            image, label = image.squeeze(2), label.squeeze(2)
        with part("augment"):
            image = augmenter.apply_intensity(image, drawn.draws)
        if depth > 1:
            image = image.unflatten(0, (-1, depth)).flatten(1, 2)
            label = label.unflatten(0, (-1, depth))[:, self.maker.neighbours]
        return Batch(image, augmenter.with_sides(label, drawn.draws), drawn.positions, names)

    def _of_slices(self, resident: Resident, numbers: np.ndarray) -> np.ndarray:
        """A row of `_numbers` for each slice of a sample: its own and its neighbours, none beyond the ends of the volume."""
        neighbours = self.maker.neighbours
        if not neighbours:
            return numbers
        on_device = numbers[:, 0] < len(resident)
        last = np.where(on_device, resident.tables.shapes[numbers[:, 0] * on_device, 0] - 1, 2 * neighbours)
        # A box holds the slices of a patch alone, its own in the middle
        first = np.where(on_device, numbers[:, 1], neighbours)
        slices = np.clip(first[:, None] + np.arange(-neighbours, neighbours + 1), 0, last[:, None])
        repeated = np.repeat(numbers, 2 * neighbours + 1, axis=0)
        repeated[:, 1] = slices.reshape(-1)
        return repeated


def _numbers(drawn: Drawn, matrix: torch.Tensor) -> np.ndarray:
    """int32 [sample, 13]: the case, the first voxel, and the bits of the matrix, all in three axes."""
    (count, axes), dimensions = drawn.corners.shape, matrix.shape[-1]
    numbers = np.zeros((count, _NUMBERS), dtype=np.int32)
    numbers[:, 0] = drawn.cases
    numbers[:, 1 + AXES - axes : 1 + AXES] = drawn.corners
    whole = np.broadcast_to(np.eye(AXES, dtype=np.float32), (count, AXES, AXES)).copy()
    whole[:, AXES - dimensions :, AXES - dimensions :] = matrix.numpy()
    numbers[:, 1 + AXES :] = whole.reshape(count, -1).view(np.int32)
    return numbers


def _in_three(displacement: torch.Tensor) -> torch.Tensor:
    """[sample, d, *spatial] as [sample, 3, *three axes]: a plane's voxels are not moved out of it."""
    if displacement.shape[1] == AXES:
        return displacement.contiguous()
    flat = displacement.unsqueeze(2)
    return torch.cat([torch.zeros_like(flat[:, :1]), flat], 1).contiguous()
