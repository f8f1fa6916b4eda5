"""Where a GPU's time goes: kernels by kind, idle time between them, and the ceilings of the card to hold rates against."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

KINDS = (
    ("layout", ("nchwtonhwc", "nhwctonchw", "transpose", "permute")),
    ("conv", ("conv", "cudnn", "xmma", "cutlass", "wgrad", "dgrad", "fprop", "gemm", "sm90", "sm80", "nvjet", "_blocks", "_few")),
    ("norm", ("_norm",)),
    ("augment", ("cut_patches", "points", "intensity", "noise", "blur", "axis", "curve", "settle", "coarse")),
    ("copy", ("copy", "memcpy", "memset", "cat", "fill")),
)  # fmt: skip
"""The first kind whose word stands in a kernel's name; `pointwise` is any other."""


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds a step: by kind, of each kernel's name with its launches, and of the GPU doing nothing."""

    kinds: dict[str, float]
    longest: list[tuple[str, float, int]] = field(default_factory=list)
    idle: float = 0.0
    whole: float = 0.0

    def __str__(self) -> str:
        parts = sorted(self.kinds.items(), key=lambda pair: -pair[1])
        shown = ", ".join(f"{kind} {spent:.2f}" for kind, spent in parts)
        return f"{shown}, idle {self.idle:.2f} of {self.whole:.2f} ms ({self.idle / self.whole:.1%})"


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    low = name.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), "pointwise")


def breakdown(step: Callable[[], object], steps: int = 10) -> Breakdown:
    """Of so many steps, warm ones. Idle is what no kernel or copy covers from the first one's start to the last one's end."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    spans = []
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spent = event.time_range.elapsed_us() / 1000 / steps
        kinds[kind_of(event.name)] += spent
        names[event.name] += spent
        counts[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    busy, whole = covered(spans)
    longest = [(name, spent, counts[name] // steps) for name, spent in names.most_common(24)]
    return Breakdown(dict(kinds), longest, (whole - busy) / 1000 / steps, whole / 1000 / steps)


def covered(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(length of the union of spans, from the first start to the last end)."""
    busy, reached = 0.0, float("-inf")
    ordered = sorted(spans)
    for begin, end in ordered:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy, (reached - ordered[0][0]) if ordered else 0.0


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches in the simplest work: TFLOP/s of a matrix product, GB/s of a copy (read and written)."""

    tflops: float
    gbs: float


def ceilings(dtype: torch.dtype, size: int = 8192) -> Ceilings:
    """Measured here and now, the best of a few."""
    one, other = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    source = torch.empty(1 << 28, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: one @ other) for _ in range(5))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return Ceilings(2 * size**3 / product / 1e12, 2 * source.numel() * 4 / copy / 1e9)


def _seconds(work: Callable[[], object], times: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
