"""Owns the judgement of an image's values, channel by channel: not finite, constant, too coarse, too large to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fasttrain.data.checking.facts import ChannelFacts, FileFacts
from fasttrain.data.reading import FLOAT16_LIMIT, WHOLE_IN_FLOAT32, coarse_fault, non_finite_fault
from fasttrain.recipe.data_spec import DataSpec


def faults_of_voxels(path: Path, names: Sequence[str], facts: FileFacts, data: DataSpec) -> list[str]:
    """One sentence for each channel that training would refuse or learn nothing from; `names`: of its channels."""
    voxels = int(np.prod(facts.shape, dtype=np.int64)) // max(len(facts.channels), 1)
    judged = (_fault(path, name, one, facts, voxels, data) for name, one in zip(names, facts.channels, strict=False))
    return [fault for fault in judged if fault is not None]


def _fault(path: Path, name: str, channel: ChannelFacts, facts: FileFacts, voxels: int, data: DataSpec) -> str | None:
    fault = non_finite_fault(path, name, channel.nans, channel.infinite, voxels, data)
    low, high = channel.minimum, channel.maximum
    if fault is not None or low is None or high is None:
        return fault
    if low == high:
        return _constant(path, name, channel, low, facts.dtype) if voxels > 1 else None
    fault = coarse_fault(path, name, np.dtype(facts.dtype), low, high)
    if fault is not None:
        return fault
    largest = max(abs(low), abs(high))
    if data.storage_dtype == "float16" and data.intensity.kind == "none" and largest > FLOAT16_LIMIT:
        return (
            f"{path} reaches {largest:.6g} in channel {name}, beyond float16's {FLOAT16_LIMIT:.0f}; set "
            "data.storage_dtype: float32, or scale with data.intensity"
        )
    return None


def _constant(path: Path, name: str, channel: ChannelFacts, value: float, dtype: str) -> str:
    filled = channel.nans + channel.infinite
    beside = f", but for {filled:,} NaN or infinite ones that would be filled with it" if filled else ""
    wide = dtype != "float32" and np.dtype(dtype).itemsize > 2 and abs(value) >= WHOLE_IN_FLOAT32
    rounded, remedy = (
        (" as float32", "subtract an offset and write the file anew") if wide else ("", "get the image anew")
    )
    return f"{path} is constant: every voxel of channel {name} is {value:.6g}{rounded}{beside}; {remedy}, or leave the case out"
