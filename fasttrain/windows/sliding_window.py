"""Owns sliding-window inference: whole volumes from overlapping, patch-sized windows, many volumes in one stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain.recipe.run_spec import WindowSpec
from fasttrain.windows.answer import Answer, Forward, RecordedAnswer
from fasttrain.windows.layout import importance, lay_out, of_all_channels
from fasttrain.windows.stitching import Sink, Stitch, Whole

_MOST_RECORDED_VOXELS = 1 << 21
"""Of a batch: with larger ones the device is busy for longer than the host needs to launch them."""
_MANY_BATCHES = 4
"""A volume of more shares no batch with others, so that no two large ones are open at a time."""


@dataclass(frozen=True)
class Told:
    """After a batch was handed to the device: of volume `index` (from 0) so many of its windows are."""

    index: int
    windows: int
    total: int


@torch.no_grad()
def predict_volume(
    forward: Forward,
    image: Tensor,
    patch: tuple[int, ...],
    spec: WindowSpec,
    device: torch.device | str,
    mirror: tuple[int, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Softmax probabilities [class, *spatial] of `image` [channel, *spatial] of any float type; float32, on `device`.

    See `predict_volumes`; `progress` is told (windows done, windows in all) after each batch.
    """
    device = torch.device(device)
    whole = Whole(tuple(image.shape[1:]))
    told = None if progress is None else lambda one: progress(one.windows, one.total)
    stream = WindowStream(Answer([forward], mirror, spec.batch_size), patch, spec, device, told=told)
    for _ in stream.predict([(image, whole)]):
        pass
    assert whole.probabilities is not None
    return whole.probabilities


class WindowStream:
    """Predicts volumes one after another, in batches that windows of several volumes share.

    Windows are blended as probabilities (so that a voxel's classes sum to 1) with the weights of `spec.blend`. An axis shorter
    than the patch is padded with zeros on both sides and cut back. Windows are computed on `device` under whatever autocast
    `answer` enters, and summed on `stitch_device`, by default the same, where nothing waits for the device. recorded: on a GPU
    full batches become a CUDA graph, where they are small enough for that to pay; `not_recorded` hears why that failed.
    neighbours: of a patch whose first axis is 1, so many slices on both sides are further channels of a window, from the lowest
    on; at its ends a volume repeats its last slice.
    """

    def __init__(
        self,
        answer: Answer,
        patch: tuple[int, ...],
        spec: WindowSpec,
        device: torch.device,
        stitch_device: torch.device | None = None,
        recorded: bool = False,
        told: Callable[[Told], None] | None = None,
        not_recorded: Callable[[str], None] = lambda _: None,
        neighbours: int = 0,
    ) -> None:
        self.answer = answer
        self.patch = patch
        self.spec = spec
        self.device = device
        self.stitch_device = stitch_device or device
        self.told = told
        self.not_recorded = not_recorded
        voxels = spec.batch_size * torch.Size(patch).numel()
        self._neighbours = neighbours
        self._record = recorded and device.type == "cuda" and voxels <= _MOST_RECORDED_VOXELS
        self._recorded: RecordedAnswer | None = None
        self._full_batches = 0
        self._apart = self.stitch_device != device
        self._pinned = self._apart and device.type == "cuda"
        self._slots: Tensor | None = None
        self._sent: Tensor
        """The slots on the windows' device: the same ones unless the two devices differ."""
        self._landing: Tensor | None = None
        self._waiting: list[tuple[int, Stitch, tuple[int, ...]]] = []

    @torch.no_grad()
    def predict(self, volumes: Iterable[tuple[Tensor, Sink]]) -> Iterator[int]:
        """Fills the sink of each (image [channel, *spatial] of any float type, sink); yields the index of each volume when its
        sink has everything, in order.

        Raises ValueError where an image has not the axes of the patch.
        """
        weights = importance(tuple(self.patch), self.spec.blend, self.stitch_device)
        for index, (image, sink) in enumerate(volumes):
            if image.ndim != len(self.patch) + 1:
                raise ValueError(
                    f"a patch of {len(self.patch)} axes cannot slide over an image of shape {tuple(image.shape)}"
                )
            image = image.to(self.stitch_device, non_blocking=True)
            layout = lay_out(image.shape[1:], self.patch, self.spec.overlap)
            alone = layout.windows > _MANY_BATCHES * self.spec.batch_size
            if alone:
                yield from self._compute()
            stitch = Stitch(layout, weights, sink, self.stitch_device)
            for corner in layout.corners():
                self._put(image, stitch, corner)
                self._waiting.append((index, stitch, corner))
                if len(self._waiting) == self.spec.batch_size:
                    yield from self._compute()
            if alone:
                yield from self._compute()
        yield from self._compute()

    def _put(self, image: Tensor, stitch: Stitch, corner: tuple[int, ...]) -> None:
        """Copies a window into the next slot, on the stitch's device."""
        slot = self._slots_for(image)[len(self._waiting)]
        there, here = stitch.layout.overlap_with(corner)
        if any(one.stop - one.start < length for one, length in zip(here, self.patch, strict=True)):
            slot.zero_()
        if not self._neighbours:
            slot[of_all_channels(here)].copy_(image[of_all_channels(there)])
            return
        for number, channels in enumerate(slot.split(len(image))):
            one = min(max(corner[0] + number - self._neighbours, 0), image.shape[1] - 1)
            channels[of_all_channels(here)].copy_(image[of_all_channels((slice(one, one + 1), *there[1:]))])

    def _slots_for(self, image: Tensor) -> Tensor:
        if self._slots is None:
            shape = (self.spec.batch_size, len(image) * (2 * self._neighbours + 1), *self.patch)
            self._slots = torch.zeros(shape, device=self.stitch_device, pin_memory=self._pinned)
            self._sent = torch.empty(shape, device=self.device) if self._apart else self._slots
        return self._slots

    def _compute(self) -> Iterator[int]:
        """Computes what waits in the slots, and yields the volumes that are complete with it."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        assert self._slots is not None
        if self._apart:
            self._sent.copy_(self._slots, non_blocking=True)
        probabilities = self._fetched(self._answered(len(waiting)))
        complete = []
        for (index, stitch, corner), one in zip(waiting, probabilities, strict=True):
            stitch.add(corner, one)
            if stitch.complete:
                complete.append(index)
        if self.told is not None:
            index, stitch, _ = waiting[-1]
            self.told(Told(index, stitch.done, stitch.layout.windows))
        yield from complete

    def _answered(self, count: int) -> Tensor:
        """Probabilities of the first windows that were sent."""
        full = count == self.spec.batch_size
        # The first full batch runs as it is: cuDNN chooses, Triton compiles
        if full and self._record and self._recorded is None and self._full_batches:
            try:
                self._recorded = RecordedAnswer(self.answer, self._sent)
            except Exception as error:
                self._record = False
                told = " ".join(str(error).split()) or type(error).__name__
                self.not_recorded(f"windows could not be recorded as a CUDA graph, so they run without: {told[:200]}")
        self._full_batches += full
        if self._recorded is not None:
            return self._recorded()[:count]
        return self.answer(self._sent[:count])

    def _fetched(self, probabilities: Tensor) -> Tensor:
        """The probabilities on the stitch's device; waits only where that is not the windows' own."""
        if not self._apart:
            return probabilities
        if self._landing is None:
            shape = (self.spec.batch_size, *probabilities.shape[1:])
            self._landing = torch.empty(shape, device=self.stitch_device, pin_memory=self._pinned)
        landed = self._landing[: len(probabilities)]
        landed.copy_(probabilities, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream(self.device).synchronize()
        return landed
