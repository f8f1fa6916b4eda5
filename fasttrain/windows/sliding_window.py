"""Owns sliding-window inference: a whole volume from overlapping, patch-sized windows, averaged over flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations

import torch
from monai.data.utils import compute_importance_map
from monai.inferers import sliding_window_inference
from torch import Tensor
from torch.nn import functional as F

from fasttrain.recipe.run_spec import WindowSpec

Forward = Callable[[Tensor], Tensor]
"""A network in eval mode: [batch, channel, *patch] → logits [batch, class, *patch]."""


def count_windows(shape: Sequence[int], patch: Sequence[int], overlap: float) -> int:
    """How many windows cover a volume of `shape` voxels: MONAI's grid, whose last window is moved back to the edge."""
    total = 1
    for size, length in zip(shape, patch, strict=True):
        step = max(int(length * (1 - overlap)), 1)
        total *= 1 if size <= length else math.ceil((size - length) / step) + 1
    return total


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

    Windows are blended as probabilities (so that a voxel's classes sum to 1) with the weights of `spec.blend`; in
    each window the probabilities are first averaged over all 2^n combinations of the flips of the spatial axes
    `mirror`. An axis shorter than the patch is padded with zeros on both sides and cut back. `forward` sees at most
    `spec.batch_size` patches at a time and runs under whatever autocast the caller has set. `progress` is told
    (windows done, windows in all) after each batch. Raises ValueError where `image` has not the axes of `patch`.
    """
    if image.ndim != len(patch) + 1:
        raise ValueError(f"a patch of {len(patch)} axes cannot slide over an image of shape {tuple(image.shape)}")
    # MONAI sums the windows in the image's type, and a sum of float16 windows loses digits.
    volume = image.to(device, non_blocking=True).float()[None]
    spatial = tuple(volume.shape[2:])
    flips = _flip_combinations(mirror)
    total, done = count_windows(spatial, patch, spec.overlap), 0

    def predict_windows(windows: Tensor) -> Tensor:
        nonlocal done
        probabilities = _mean_over_flips(forward, windows, flips, spec.batch_size)
        done += len(windows)
        if progress is not None:
            progress(done, total)
        return probabilities

    if total == 1:
        return _predict_single(predict_windows, volume, patch)
    blended: Tensor = sliding_window_inference(
        inputs=volume,
        roi_size=patch,
        sw_batch_size=spec.batch_size,
        predictor=predict_windows,
        overlap=spec.overlap,
        mode=spec.blend,
        roi_weight_map=_importance(tuple(patch), spec.blend, volume.device),
    )
    return blended[0]


def _predict_single(predict_windows: Forward, volume: Tensor, patch: tuple[int, ...]) -> Tensor:
    """A volume no larger than one window: the same padding as MONAI's, and nothing to weigh or stitch."""
    spatial = volume.shape[2:]
    missing = [length - size for length, size in zip(patch, spatial, strict=True)]
    if any(missing):
        volume = F.pad(volume, [side for gap in reversed(missing) for side in (gap // 2, gap - gap // 2)])
    probabilities = predict_windows(volume)[0]
    inner = (slice(gap // 2, gap // 2 + size) for gap, size in zip(missing, spatial, strict=True))
    index = (slice(None), *inner)
    return probabilities[index]


def _flip_combinations(mirror: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All subsets of the spatial axes, as axes of a batched tensor; the first is no flip at all."""
    axes = [axis + 2 for axis in mirror]
    return [subset for count in range(len(axes) + 1) for subset in combinations(axes, count)]


def _mean_over_flips(forward: Forward, windows: Tensor, flips: list[tuple[int, ...]], batch_size: int) -> Tensor:
    """Softmax [batch, class, *patch] averaged over `flips`, as many of them in one pass as `batch_size` has room for."""
    together = max(batch_size // len(windows), 1)
    mean: Tensor | None = None
    for start in range(0, len(flips), together):
        group = flips[start : start + together]
        stacked = windows if group == [()] else torch.cat([torch.flip(windows, axes) for axes in group])
        probabilities = torch.softmax(forward(stacked).float(), dim=1)
        for part, axes in zip(probabilities.split(len(windows)), group, strict=True):
            unflipped = torch.flip(part, axes) if axes else part
            mean = unflipped if mean is None else mean + unflipped
    assert mean is not None
    return mean / len(flips) if len(flips) > 1 else mean


@lru_cache(maxsize=4)
def _importance(patch: tuple[int, ...], blend: str, device: torch.device) -> Tensor:
    """Weights [*patch] of a window's voxels; kept, since making them waits for the device once a volume."""
    with torch.inference_mode(False):
        weights: Tensor = compute_importance_map(patch, mode=blend, device=device, dtype=torch.float32)
    return weights
