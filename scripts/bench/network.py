"""How fast a training step of a network alone is (no data), as plain torch runs it and in fasttrain's channels-last form.

    python scripts/bench/network.py [--work dynunet-128 …] [--variant NAME …] [--steps 20] [--repeats 5] [--profile]

Prints patches/s (medians of the repeats, by device events), the share of the ceiling that its convolutions' arithmetic
reaches, and with --profile where a step's time goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from fasttrain.losses import build_loss
from fasttrain.networks import build_network
from fasttrain.networks.fused import fuse
from fasttrain.recipe.network_spec import NetworkSpec
from fasttrain.recipe.training_spec import LossSpec
from fasttrain.studies.ceilings import peaks_of
from fasttrain.studies.profiling.kernels import breakdown

DYNUNET: dict[str, Any] = {"kind": "dynunet", "deep_supervision": 0}
WORK: dict[str, dict[str, Any]] = {
    "dynunet-128": {
        "network": {**DYNUNET, "features": [32, 64, 128, 256, 320, 320], "strides": [2, 2, 2, 2, 2]},
        "patch": (128, 128, 128), "batch": 4, "channels": 1, "classes": 3,
    },
    "hippocampus-9": {
        "network": {**DYNUNET, "features": [32, 64, 128, 256], "strides": [2, 2, 2]},
        "patch": (40, 56, 40), "batch": 9, "channels": 1, "classes": 3,
    },
    "hippocampus-36": {
        "network": {**DYNUNET, "features": [32, 64, 128, 256], "strides": [2, 2, 2]},
        "patch": (40, 56, 40), "batch": 36, "channels": 1, "classes": 3,
    },
    "spleen-16": {
        "network": {
            "kind": "unet", "features": [32, 64, 128, 256, 512], "strides": [2, 2, 2, 2], "residual_units": 2,
            "norm": "batch", "activation": "prelu", "dropout": 0.2,
        },
        "patch": (96, 96, 96), "batch": 16, "channels": 1, "classes": 2,
    },
}  # fmt: skip


class Loop:
    """Steps of one network on a fixed batch; `variant` says how."""

    def __init__(self, work: dict[str, Any], variant: str, dtype: torch.dtype) -> None:
        spec = TypeAdapter(NetworkSpec).validate_python(work["network"])
        torch.manual_seed(0)
        self.network: nn.Module = build_network(spec, work["patch"], work["channels"], work["classes"]).cuda()
        self.loss = build_loss(
            TypeAdapter(LossSpec).validate_python({"kind": "dice_ce"}), fused="fused" in variant
        ).cuda()
        shape = (work["batch"], work["channels"], *work["patch"])
        self.image = torch.randn(shape, device="cuda")
        self.label = torch.randint(work["classes"], (shape[0], 1, *shape[2:]), device="cuda", dtype=torch.uint8)
        self.dtype = dtype
        if "channels_last" in variant or "fused" in variant:
            self.network.to(memory_format=torch.channels_last_3d)
            self.image = self.image.contiguous(memory_format=torch.channels_last_3d)
        if "fused" in variant:
            fuse(self.network)
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-3, momentum=0.99, nesterov=True, fused=True)
        self.forward = torch.compile(self.network) if "compile" in variant else self.network
        self.criterion = torch.compile(self.loss) if "compile" in variant else self.loss
        self.step: Callable[[], None] = self._step
        if "graph" in variant:
            self.step = self._captured()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=self.dtype):
            logits = self.forward(self.image)
        self.criterion(logits, self.label).backward()
        self.optimizer.step()

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


def measure(loop: Loop, steps: int, repeats: int) -> tuple[float, float]:
    """Seconds a step, median of the repeats, and their spread."""
    for _ in range(3):
        loop.step()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            loop.step()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / steps)
    return statistics.median(found), (max(found) - min(found)) / statistics.median(found)


def operations(work: dict[str, Any]) -> float:
    """Multiplications and additions of the convolutions of one step, by torch's own counter: forward, and twice that backward."""
    from torch.utils.flop_counter import FlopCounterMode

    spec = TypeAdapter(NetworkSpec).validate_python(work["network"])
    with torch.device("meta"):
        network = build_network(spec, work["patch"], work["channels"], work["classes"])
        image = torch.empty(work["batch"], work["channels"], *work["patch"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(image)
    return 3.0 * counter.get_total_flops()


def by_shape(loop: Loop, steps: int = 3) -> list[tuple[str, float]]:
    """Milliseconds a step of torch's operations by their shapes, of the step as it runs without a graph."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    loop._step()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as seen:
        for _ in range(steps):
            loop._step()
        torch.cuda.synchronize()
    rows = [
        (
            f"{event.count // steps:3d}× {event.key} {event.input_shapes[:3]}"[:150],
            event.self_device_time_total / 1000 / steps,
        )
        for event in seen.key_averages(group_by_input_shape=True)
    ]
    return sorted(rows, key=lambda row: -row[1])[:30]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", nargs="+", default=list(WORK))
    parser.add_argument("--variant", nargs="+", default=["plain", "channels_last", "fused", "fused+graph"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    top = peaks_of(getattr(torch, options.dtype), torch.device("cuda"))
    tflops, gbs = top["peak_flops"] / 1e12, top["peak_bandwidth"] / 1e9
    print(f"ceilings: {tflops:.0f} TFLOP/s of a matrix product, {gbs:.0f} GB/s of a copy")
    for name in options.work:
        work = WORK[name]
        flops = operations(work)
        for variant in options.variant:
            began = time.perf_counter()
            loop = Loop(work, variant, getattr(torch, options.dtype))
            seconds, spread = measure(loop, options.steps, options.repeats)
            took = time.perf_counter() - began
            reached = f", {flops / seconds / 1e12:.0f} TFLOP/s of convolutions, {flops / seconds / 1e12 / tflops:.0%}"
            print(
                f"{name:<16} {variant:<16} {work['batch'] / seconds:8.1f} patches/s  {seconds * 1000:7.2f} ms  ±{spread:.1%}  "
                f"{torch.cuda.max_memory_allocated() / (1 << 30):.1f} GiB  ({took:.0f} s in all){reached}",
                flush=True,
            )
            print(name, variant, file=sys.stderr)
            if options.profile and "graph" in variant:
                found = breakdown(loop.step, steps=5)
                print(f"   {found}")
                for kernel, milliseconds, count in found.longest:
                    print(f"   {milliseconds:7.3f} ms {count:4d}× {kernel[:150]}", file=sys.stderr)
            if options.shapes and "graph" in variant:
                for row, spent in by_shape(loop):
                    print(f"   {spent:7.3f} ms {row}", file=sys.stderr)
            del loop
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
