"""Owns the network's answer for one volume: a map of class indices on the grid of the file or on the preprocessed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fasttrain.data.restore import class_map_in_source_grid
from fasttrain.engine.step import Precision
from fasttrain.recipe import Recipe
from fasttrain.samples import Sample
from fasttrain.windows import predict_volume

WindowsTold = Callable[[int, int], None]
"""Told how many windows of a volume are done, and of how many."""
WithinTold = Callable[[int, int, str], None]
"""Told how many cases are done, of how many, and how far the one under way has come."""
_SECONDS_BETWEEN = 1.0


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


class Predictor:
    """A network with the recipe's windows; used by validation, `evaluate` and `predict` alike, so that they agree."""

    def __init__(self, network: nn.Module, recipe: Recipe, precision: Precision, device: torch.device) -> None:
        self.network = network
        self.recipe = recipe
        self.precision = precision
        self.device = device

    def probabilities(self, sample: Sample, told: WindowsTold | None = None) -> Tensor:
        """Probabilities of the classes, [class, *spatial] float32 on the device, on the preprocessed grid."""
        self.network.eval()
        validation = self.recipe.validation
        with torch.no_grad():
            return predict_volume(
                self._forward,
                sample.image,
                self.recipe.patch.size,
                validation.window,
                self.device,
                validation.mirror,
                told,
            )

    def class_map(self, sample: Sample, in_source_grid: bool, told: WindowsTold | None = None) -> Tensor:
        """uint8 class indices [*spatial] on the device."""
        return _class_map(self.probabilities(sample, told), sample, in_source_grid)

    def _forward(self, windows: Tensor) -> Tensor:
        with self.precision.autocast():
            logits: Tensor = self.network(self.precision.laid_out(windows))
        return two_class_logits(logits) if logits.shape[1] == 1 else logits


class Ensemble:
    """Several networks that answer as one: the mean of their probabilities."""

    def __init__(self, members: Sequence[Predictor]) -> None:
        self.members = tuple(members)

    def probabilities(self, sample: Sample, told: WindowsTold | None = None) -> Tensor:
        """As a Predictor's; one network after another, so that no more than two answers are kept at a time.

        The windows told are those of all networks.
        """
        total = self.members[0].probabilities(sample, self._part(0, told))
        for number, member in enumerate(self.members[1:], start=1):
            total += member.probabilities(sample, self._part(number, told))
        return total.div_(len(self.members))

    def class_map(self, sample: Sample, in_source_grid: bool, told: WindowsTold | None = None) -> Tensor:
        """uint8 class indices [*spatial] on the device."""
        return _class_map(self.probabilities(sample, told), sample, in_source_grid)

    def _part(self, number: int, told: WindowsTold | None) -> WindowsTold | None:
        if told is None:
            return None
        return lambda done, total: told(number * total + done, len(self.members) * total)


def _class_map(probabilities: Tensor, sample: Sample, in_source_grid: bool) -> Tensor:
    if in_source_grid:
        return class_map_in_source_grid(probabilities, sample.grid, sample.source_grid)
    return probabilities.argmax(0).to(torch.uint8)


def two_class_logits(logits: Tensor) -> Tensor:
    """[batch, 2, *spatial] whose softmax is (1 − sigmoid, sigmoid) of the one channel: its likelier class is a threshold at 0.5.

    So windows, flips, resampling and scores know one kind of network only.
    """
    return torch.cat([torch.zeros_like(logits), logits], dim=1)
