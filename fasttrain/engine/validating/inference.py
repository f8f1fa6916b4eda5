"""Owns the network's answer for volumes: maps of class indices on the grid of the file or on the preprocessed one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fasttrain.data.restore import GrowingClassMap, GrowingDose, drawn_regions, likeliest_class
from fasttrain.engine.step import Precision
from fasttrain.errors import ran_out_of_memory
from fasttrain.kernels.structure_bits import as_dose, network_input
from fasttrain.recipe import Recipe
from fasttrain.samples import Grid
from fasttrain.windows import Answer, Forward, Sides, Told, Whole, WindowStream, of_slices, sigmoid

WindowsTold = Callable[[int, int], None]
"""Told how many windows of a volume are done, and of how many."""
WithinTold = Callable[[int, int, str], None]
"""Told how many cases are done, of how many, and how far the one under way has come."""
_SECONDS_BETWEEN = 1.0
CPU = torch.device("cpu")


class Volume(Protocol):
    """What is predicted: a Sample, or what is kept of one. `image` [channel, *spatial] lies on the host or on the GPU, with it
    `label`, of which a dose takes its structures.
    """

    @property
    def image(self) -> Tensor: ...

    @property
    def label(self) -> Tensor | None: ...

    @property
    def grid(self) -> Grid: ...

    @property
    def source_grid(self) -> Grid: ...


class Volumes(Protocol):
    """Volumes by index; one that is asked for again is the same one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Volume: ...


def telling(within: WithinTold | None, done: int, total: int, name: str) -> WindowsTold | None:
    """What tells `within` of the windows of the case `name`, once a second and not at all where the case takes less.

    It looks at the host's clock alone: on a GPU the windows are those that were handed over, and none is waited for.
    """
    if within is None:
        return None
    last = time.monotonic()

    def told(windows: int, all_windows: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN:
            last = now
            within(done, total, f"{name}, {windows} of {all_windows} windows")

    return told


class Inference(ABC):
    """Networks with the recipe's windows; used by validation, `evaluate` and `predict` alike, so that they agree.

    stitch_device: where windows are summed; a GPU that turns out too small for it hands that to the CPU, and `warn` hears of it.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.stitch_device = device
        self.warn: Callable[[str], None] = lambda _: None
        setting = recipe.acceleration.cuda_graphs
        # A network by name may ask the host in its forward pass
        self._recorded = setting == "on" or (setting == "auto" and recipe.network.kind != "monai")
        regions = recipe.regions
        self._decide = likeliest_class if regions is None else drawn_regions(regions.written, regions.exact)

    @abstractmethod
    def _forwards(self) -> tuple[Forward, ...]:
        """The networks in eval mode."""

    def probabilities(self, volume: Volume, told: WindowsTold | None = None) -> Tensor:
        """Probabilities of the classes or regions, [class, *spatial] float32 on `stitch_device`, on the preprocessed grid."""
        whole = Whole(tuple(volume.image.shape[1:]))
        stream = self._stream(None if told is None else lambda one: told(one.windows, one.total))
        for _ in stream.predict([(self._seen(volume), whole)]):
            pass
        assert whole.probabilities is not None
        return whole.probabilities

    def class_map(self, volume: Volume, in_source_grid: bool, told: WindowsTold | None = None) -> Tensor:
        """uint8 class indices [*spatial] on `stitch_device`."""
        hears = None if told is None else lambda one: told(one.windows, one.total)
        ((_, classes),) = self.class_maps([volume], in_source_grid, hears)
        return classes

    def dose_map(self, volume: Volume, in_source_grid: bool, told: WindowsTold | None = None) -> Tensor:
        """Float32 Gy [*spatial] on `stitch_device`."""
        hears = None if told is None else lambda one: told(one.windows, one.total)
        ((_, dose),) = self.dose_maps([volume], in_source_grid, hears)
        return dose

    def dose_maps(
        self,
        volumes: Volumes,
        in_source_grid: bool,
        told: Callable[[Told], None] | None = None,
        short_of_memory: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Tensor]]:
        """As `class_maps` for `task: dose`: (index, float32 Gy [*spatial]), never negative, whatever lies outside the mask."""
        return self._maps(volumes, in_source_grid, told, short_of_memory)

    def class_maps(
        self,
        volumes: Volumes,
        in_source_grid: bool,
        told: Callable[[Told], None] | None = None,
        short_of_memory: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Tensor]]:
        """(index, uint8 class indices [*spatial] on `stitch_device`) of each volume in turn; the device is not waited for.

        Windows of several volumes share batches. `told` hears of each batch, and may raise. Where the GPU's memory runs out,
        `short_of_memory` is to give back what is kept there, and what is not done yet is summed on the CPU.
        """
        return self._maps(volumes, in_source_grid, told, short_of_memory)

    def _maps(
        self,
        volumes: Volumes,
        in_source_grid: bool,
        told: Callable[[Told], None] | None,
        short_of_memory: Callable[[], None],
    ) -> Iterator[tuple[int, Tensor]]:
        done = 0
        while done < len(volumes):
            ran_out = False
            try:
                for index, answer in self._maps_from(done, volumes, in_source_grid, told):
                    done = index + 1
                    yield index, answer
            except Exception as error:
                if self.stitch_device == CPU or not ran_out_of_memory(error):
                    raise
                ran_out = True
            if ran_out:
                # Here, since the error held on to all that was computed
                self.stitch_device = CPU
                short_of_memory()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                self.warn(
                    "the GPU ran out of memory in validation; windows are computed there and summed in the host's memory "
                    "from here on"
                )

    def _maps_from(
        self, first: int, volumes: Volumes, in_source_grid: bool, told: Callable[[Told], None] | None
    ) -> Iterator[tuple[int, Tensor]]:
        maps: dict[int, GrowingClassMap | GrowingDose] = {}

        def given() -> Iterator[tuple[Tensor, GrowingClassMap | GrowingDose]]:
            for index in range(first, len(volumes)):
                volume = volumes[index]
                shape = tuple(volume.image.shape[1:])
                grid, source = (volume.grid, volume.source_grid) if in_source_grid else (None, None)
                maps[index] = (
                    GrowingDose(shape, self.stitch_device, self.recipe.data.dose_scale, grid, source)
                    if self.recipe.task == "dose"
                    else GrowingClassMap(shape, self.stitch_device, grid, source, self._decide)
                )
                yield self._seen(volume), maps[index]

        hears = None if told is None else lambda one: told(Told(first + one.index, one.windows, one.total))
        for index in self._stream(hears).predict(given()):
            yield first + index, maps.pop(first + index).finished()

    def _seen(self, volume: Volume) -> Tensor:
        """What the network sees of a volume, [channel, *spatial] on `stitch_device`."""
        image = sent(volume.image, self.stitch_device)
        if self.recipe.task != "dose":
            return image
        assert volume.label is not None
        return network_input(image, sent(volume.label, self.stitch_device), len(self.recipe.data.classes))

    def _stream(self, told: Callable[[Told], None] | None) -> WindowStream:
        validation = self.recipe.validation
        forwards, mirror = self._forwards(), validation.mirror
        if self.recipe.data.slices is not None:
            # The axis across which the volume is cut comes first
            forwards, mirror = tuple(map(of_slices, forwards)), tuple(axis + 1 for axis in mirror)
        answer = Answer(forwards, mirror, validation.window.batch_size)
        if self.recipe.data.regions:
            answer.finish = sigmoid
        axis = self.recipe.left_right_axis
        if axis is not None:
            # The files' channels come before the structures'
            first = len(self.recipe.data.channels)
            answer.sides = Sides(axis, tuple((first + left, first + right) for left, right in self.recipe.sides))
            answer.finish = as_dose
        return WindowStream(
            answer,
            self.recipe.box,
            validation.window,
            self.device,
            self.stitch_device,
            self._recorded,
            told,
            self._not_recorded,
            self.recipe.neighbours,
        )

    def _not_recorded(self, why: str) -> None:
        self._recorded = False
        self.warn(why)


class Predictor(Inference):
    """One network."""

    def __init__(self, network: nn.Module, recipe: Recipe, precision: Precision, device: torch.device) -> None:
        super().__init__(recipe, device)
        self.network = network
        self.precision = precision

    def forward(self, windows: Tensor) -> Tensor:
        """Logits [batch, class, *patch]; of one channel's sigmoid those of two classes; regions and doses as they are."""
        with self.precision.autocast():
            logits: Tensor = self.network(self.precision.laid_out(windows))
        return two_class_logits(logits) if logits.shape[1] < self.recipe.answer_channels else logits

    def _forwards(self) -> tuple[Forward, ...]:
        self.network.eval()
        return (self.forward,)


class Ensemble(Inference):
    """Several networks that answer as one: the mean of their probabilities, taken window by window."""

    def __init__(self, members: Sequence[Predictor]) -> None:
        super().__init__(members[0].recipe, members[0].device)
        self.members = tuple(members)

    def _forwards(self) -> tuple[Forward, ...]:
        return tuple(forward for member in self.members for forward in member._forwards())


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU takes it by way of pinned memory, so that it is not waited for."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def two_class_logits(logits: Tensor) -> Tensor:
    """[batch, 2, *spatial] whose softmax is (1 − sigmoid, sigmoid) of the one channel: its likelier class is a threshold at 0.5.

    So windows, flips, resampling and scores know one kind of network only.
    """
    return torch.cat([torch.zeros_like(logits), logits], dim=1)
