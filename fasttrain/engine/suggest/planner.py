"""Owns the numbers of a suggested recipe: grid, patch, network and batch by nnU-Net's rules and the memory of the device.

The rules are those of nnU-Net v2's planner (Isensee et al., Nature Methods 2021, and the code published with it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ANISOTROPY = 3.0
"""An axis is coarse where its spacing is this many times that of every other axis."""
LEAST_EDGE = 4
"""Voxels along an axis of the lowest stage."""
DATA_SHARE = 0.05
"""Of the voxels of the set, the most that one batch may hold."""
ELEMENTS_AT_8_GIB = {3: 2 * 560_000_000, 2: 12 * 85_000_000}
"""Feature-map values of one step that nnU-Net fits into 8 GB: its reference value a patch times its reference batch."""
USED_SHARE = 0.75
"""Of the card's memory; the rest is for the allocator, convolution workspace and whole volumes at validation."""
MOST_GIB = 24.0
"""nnU-Net's recommended preset (ResEnc L) is planned for this much; larger patches gain little and take long."""
CPU_GIB = 0.25
_CPU_BATCH = 4
_START_EDGE = {3: (256, 3), 2: (2048, 2)}
_HEAD_COPIES = 3
"""Full-size values a class: logits, probabilities and their gradient."""
_TINY_EDGE = 6


@dataclass(frozen=True)
class NetworkPlan:
    """`patch` with the network that fits it; strides between each two stages, axis by axis."""

    patch: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    kernels: tuple[tuple[int, ...], ...]
    """What nnU-Net would take in each stage: 1 along an axis until its spacing is within a factor 2 of the finest."""

    @property
    def stages(self) -> int:
        """Of the encoder, the lowest among them."""
        return len(self.strides) + 1


@dataclass(frozen=True)
class SuggestedPlan:
    """All numbers that the memory and the grid decide."""

    spacing: tuple[float, ...]
    coarse_axis: int | None
    median_shape: tuple[int, ...]
    network: NetworkPlan
    features: tuple[int, ...]
    deep_supervision: int
    batch_size: int
    batch_in_memory: int
    batch_in_data: int
    elements: int
    budget_gib: float
    gpu_gib: float | None

    @property
    def step_gib(self) -> float:
        """The formula's estimate of one training step."""
        dimensions = len(self.network.patch)
        return 8 * self.elements * self.batch_size / ELEMENTS_AT_8_GIB[dimensions]

    @property
    def covered(self) -> float:
        """Share of a median volume that one patch holds."""
        pairs = zip(self.network.patch, self.median_shape, strict=True)
        return math.prod(min(length / whole, 1.0) for length, whole in pairs)


def plan_for(
    shapes: np.ndarray, spacings: np.ndarray, channels: int, classes: int, gpu_gib: float | None
) -> SuggestedPlan:
    """The plan for a set with `shapes` and `spacings` [case, axis] and `classes` foreground classes.

    `gpu_gib` is the card's whole memory; None or 0 plans small steps for a CPU.
    """
    dimensions = shapes.shape[1]
    on_gpu = bool(gpu_gib)
    budget_gib = min(USED_SHARE * gpu_gib, MOST_GIB) if gpu_gib else CPU_GIB
    budget = ELEMENTS_AT_8_GIB[dimensions] * budget_gib / 8
    spacing, coarse = target_spacing(shapes, spacings)
    median = np.maximum(np.median(np.rint(shapes * spacings / spacing), axis=0).astype(np.int64), 1)
    first, most = (32, 320 if dimensions == 3 else 512) if on_gpu else (16, 128)

    def elements_of(network: NetworkPlan) -> int:
        return step_elements(network, _features(network, first, most), channels, classes)

    network = _largest_network(median, spacing, lambda network: elements_of(network) * 2 <= budget)
    elements = elements_of(network)
    in_memory = int(budget // elements)
    in_data = round(float(np.prod(median)) * len(shapes) * DATA_SHARE / math.prod(network.patch))
    batch = max(min(in_memory, in_data, in_memory if on_gpu else _CPU_BATCH), 2)
    return SuggestedPlan(
        spacing=tuple(float(value) for value in spacing),
        coarse_axis=coarse,
        median_shape=tuple(int(length) for length in median),
        network=network,
        features=_features(network, first, most),
        deep_supervision=max(network.stages - 3, 0),
        batch_size=batch,
        batch_in_memory=in_memory,
        batch_in_data=in_data,
        elements=elements,
        budget_gib=budget_gib,
        gpu_gib=gpu_gib or None,
    )


def target_spacing(shapes: np.ndarray, spacings: np.ndarray) -> tuple[np.ndarray, int | None]:
    """The median spacing; along a coarse axis of volumes the tenth percentile of it, and which axis that is.

    nnU-Net calls an axis coarse where its spacing is over three times all others and it has under a third of their voxels.
    """
    target, size = np.median(spacings, axis=0), np.median(shapes, axis=0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(len(target)) if axis != worst]
    coarse = target[worst] > ANISOTROPY * target[others].max() and size[worst] * ANISOTROPY < size[others].min()
    if not coarse or len(target) < 3:
        return target, None
    target[worst] = max(np.percentile(spacings[:, worst], 10), target[others].max())
    return target, worst


def network_for(patch: Sequence[int], spacing: Sequence[float] | np.ndarray) -> NetworkPlan:
    """Poolings for a patch, which is enlarged until they divide it.

    An axis is halved while it has 8 voxels and its spacing is within a factor 2 of the finest that can be halved; the last
    axis left alone only while it has 12.
    """
    size, mm = [float(length) for length in patch], list(spacing)
    strides: list[tuple[int, ...]] = []
    kernels: list[tuple[int, ...]] = []
    kernel = [1] * len(size)
    while True:
        axes = [axis for axis, length in enumerate(size) if length >= 2 * LEAST_EDGE]
        finest = min((mm[axis] for axis in axes), default=0.0)
        axes = [axis for axis in axes if mm[axis] / finest < 2]
        if not axes or (len(axes) == 1 and size[axes[0]] < 3 * LEAST_EDGE):
            break
        kernel = [3 if mm[axis] / min(mm) < 2 else found for axis, found in enumerate(kernel)]
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in axes else 1 for axis in range(len(size))))
        for axis in axes:
            mm[axis] *= 2
            size[axis] = math.ceil(size[axis] / 2)
    factors = [math.prod(stride[axis] for stride in strides) for axis in range(len(size))]
    padded = tuple(-(-length // factor) * factor for length, factor in zip(patch, factors, strict=True))
    if len(strides) < 2:
        return _tiny_network(patch)
    return NetworkPlan(padded, tuple(strides), (*kernels, (3,) * len(size)))


def step_elements(network: NetworkPlan, features: Sequence[int], channels: int, classes: int) -> int:
    """Values that one patch puts into the feature maps of a step: two convolutions a stage down; the upsampling, two
    convolutions and the skip's merge up; input, and the full-size maps of all classes and the background.
    """
    size = list(network.patch)
    total = (channels + _HEAD_COPIES * (classes + 1)) * math.prod(size)
    for stage, count in enumerate(features):
        size = (
            [length // step for length, step in zip(size, network.strides[stage - 1], strict=True)] if stage else size
        )
        is_lowest = stage == len(features) - 1
        total += (2 if is_lowest else 5) * count * math.prod(size)
    return total


def _features(network: NetworkPlan, first: int, most: int) -> tuple[int, ...]:
    return tuple(min(first << stage, most) for stage in range(network.stages))


def _largest_network(median: np.ndarray, spacing: np.ndarray, fits: Callable[[NetworkPlan], bool]) -> NetworkPlan:
    """From a patch of the median shape (at most 256³ or 2048², cubic in mm), less along the axis that covers most of it."""
    edge, dimensions = _START_EDGE[len(median)]
    density = 1 / spacing
    start = np.rint(density * (edge**dimensions / np.prod(density)) ** (1 / dimensions))
    network = network_for([int(max(min(pair), 1)) for pair in zip(start, median, strict=True)], spacing)
    while not fits(network):
        smaller = _smaller(network, median, spacing)
        if smaller is None:
            break
        network = smaller
    return network


def _smaller(network: NetworkPlan, median: np.ndarray, spacing: np.ndarray) -> NetworkPlan | None:
    """None where no axis can give way."""
    patch = network.patch
    for axis in np.argsort([length / whole for length, whole in zip(patch, median, strict=True)])[::-1]:
        # By the smallest step that the network of the smaller patch allows: 256 goes to 224, not to 192
        step = _factor(network, axis)
        if patch[axis] - step < 2 * LEAST_EDGE:
            continue
        reduced = network_for(_less(patch, axis, step), spacing)
        step = _factor(reduced, axis)
        smaller = network_for(_less(patch, axis, step), spacing)
        if math.prod(smaller.patch) < math.prod(patch):
            return smaller
    return None


def _factor(network: NetworkPlan, axis: int) -> int:
    return math.prod(stride[axis] for stride in network.strides)


def _less(patch: tuple[int, ...], axis: int, step: int) -> list[int]:
    return [length - step if index == axis else length for index, length in enumerate(patch)]


def _tiny_network(patch: Sequence[int]) -> NetworkPlan:
    """Two poolings of all axes but the thinnest: the network has three stages at least, whatever the size of the volumes."""
    pooled = [length >= _TINY_EDGE or length == max(patch) for length in patch]
    padded = tuple(
        -(-max(length, 2 * LEAST_EDGE) // 4) * 4 if here else length for length, here in zip(patch, pooled, strict=True)
    )
    stride = tuple(2 if here else 1 for here in pooled)
    return NetworkPlan(padded, (stride, stride), ((3,) * len(padded),) * 3)
