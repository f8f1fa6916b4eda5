"""Owns what kinds of work a device's time goes to, by the names of kernels (on a CPU of operations), and its idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fasttrain.studies.profiling.marks import unmarked_errors

_KERNELS = (
    ("layout", ("nchwtonhwc", "nhwctonchw", "transpose", "permute")),
    ("conv", ("conv", "cudnn", "xmma", "cutlass", "wgrad", "dgrad", "fprop", "gemm", "sm90", "sm80", "nvjet", "_blocks", "_few")),
    ("norm", ("_norm",)),
    ("augment", ("cut_patches", "points", "intensity", "noise", "blur", "axis", "curve", "settle", "coarse")),
    ("copy", ("copy", "memcpy", "memset", "cat", "fill")),
)  # fmt: skip
"""The first kind whose word stands in a kernel's name; `pointwise` is any other."""
_OPERATIONS = (
    ("conv", ("conv", "addmm", "::mm", "::bmm", "baddbmm", "matmul", "linear")),
    ("norm", ("norm",)),
    ("layout", ("contiguous", "clone", "to_dense", "to_mkldnn", "reorder", "permute", "transpose")),
    ("copy", ("copy", "::cat", "fill", "zero")),
)
"""The like for torch's operations on a CPU."""
_LONGEST = 24
_WARM_UP = 3


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds a step: by kind, of each kernel's name with its launches, and of the device doing nothing.

    `whole` is from the first kernel's start to the last one's end; on a CPU it is that of operations, and `idle` what none of
    torch's takes of it.
    """

    kinds: dict[str, float]
    longest: list[tuple[str, float, int]] = field(default_factory=list)
    idle: float = 0.0
    whole: float = 0.0

    @property
    def idle_share(self) -> float:
        """Of the whole, 0 to 1."""
        return self.idle / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        parts = sorted(self.kinds.items(), key=lambda pair: -pair[1])
        shown = ", ".join(f"{kind} {spent:.2f}" for kind, spent in parts)
        return f"{shown}, idle {self.idle:.2f} of {self.whole:.2f} ms ({self.idle_share:.1%})"


def kind_of(name: str, on_gpu: bool = True) -> str:
    """The kind of a kernel, or of an operation, by its name."""
    low = name.lower()
    table = _KERNELS if on_gpu else _OPERATIONS
    return next((kind for kind, words in table if any(word in low for word in words)), "pointwise")


def breakdown(
    step: Callable[[], object], steps: int = 10, on_gpu: bool = True, trace: Path | None = None, ranges: bool = False
) -> Breakdown:
    """Of so many steps, warm ones. trace: takes the Chrome trace. ranges: operations and their names are recorded on a GPU too,
    which costs the host time.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(_WARM_UP if on_gpu else 1):
        step()
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if ranges and on_gpu:
        activities.append(ProfilerActivity.CPU)
    if on_gpu:
        torch.cuda.synchronize()
    seen = torch_profile(activities=activities)
    with unmarked_errors():
        seen.start()
    try:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    finally:
        with unmarked_errors():
            seen.stop()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    return _of_kernels(seen, steps) if on_gpu else _of_operations(seen, steps)


def _of_kernels(seen: Any, steps: int) -> Breakdown:
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    spans = []
    for event in seen.events():
        # Ranges of the host's are shown on the device's line as well, where they cover what they launched
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        spent = event.time_range.elapsed_us() / 1000 / steps
        kinds[kind_of(event.name)] += spent
        names[event.name] += spent
        counts[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    busy, whole = covered(spans)
    longest = [(name, float(spent), counts[name] // steps) for name, spent in names.most_common(_LONGEST)]
    return Breakdown(dict(kinds), longest, (whole - busy) / 1000 / steps, whole / 1000 / steps)


def _of_operations(seen: Any, steps: int) -> Breakdown:
    kinds: Counter[str] = Counter()
    rows: list[tuple[str, float, int]] = []
    for event in seen.key_averages():
        spent = event.self_cpu_time_total / 1000 / steps
        if "::" not in event.key or spent <= 0:
            continue
        kinds[kind_of(event.key, on_gpu=False)] += spent
        rows.append((event.key, spent, event.count // steps))
    spans = [(event.time_range.start, event.time_range.end) for event in seen.events()]
    whole = covered(spans)[1] / 1000 / steps
    longest = sorted(rows, key=lambda row: -row[1])[:_LONGEST]
    return Breakdown(dict(kinds), longest, max(whole - sum(kinds.values()), 0.0), whole)


def covered(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(length of the union of spans, from the first start to the last end)."""
    busy, reached = 0.0, float("-inf")
    ordered = sorted(spans)
    for begin, end in ordered:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy, (reached - ordered[0][0]) if ordered else 0.0
