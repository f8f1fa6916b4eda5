"""How fast a recipe's steps are in their steady state, data and augmentation included, beside the same step without them.

    python scripts/bench/steady.py --recipe hippocampus --data DIR [--set KEY=VALUE]… [--device auto] [--steps 100] [--repeats 5]
                                   [--profile]

The run is prepared and built as `fasttrain train` does it. First whole steps are timed: draws, crops, augmentation, forward,
backward, update. Then the same step over one batch that lies ready, which is the network's own rate. Printed are patches/s
(medians of the repeats, by the clock with the device waited for at both ends) and the share of the second that the first reaches;
with --profile where the time of whole steps goes on the GPU, idle time included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fasttrain.engine.build import build, prepare_torch
from fasttrain.engine.preparing import prepare
from fasttrain.recipe import resolve
from fasttrain.studies.profiling.kernels import breakdown

_WARM_UP = 12


def main() -> None:
    options = _options()
    recipe = resolve(options.recipe, [*options.set, f"training.iterations_per_epoch={10**6}"]).recipe
    told = lambda event: None  # noqa: E731
    prepared = prepare(recipe, options.data, options.device, told)
    plan, hardware = prepared.plan, prepared.hardware
    prepare_torch(plan, hardware)
    assembly = build(recipe, plan, hardware, prepared.split, lambda what, done, total: None, lambda text, level: None)
    on_gpu = hardware.on_gpu
    try:
        reports = assembly.trainer.steps()
        whole = _rates(lambda: next(reports), options, plan.sizes.effective_batch, on_gpu)
        found = None
        if options.profile and on_gpu:
            found = breakdown(lambda: next(reports), steps=20)
        batch = next(assembly.trainer.source.batches(0))
        step, rate = assembly.trainer.step, recipe.optimizer.learning_rate * 1e-3
        alone = _rates(lambda: step(itertools.repeat(batch), rate), options, plan.sizes.effective_batch, on_gpu)
    finally:
        assembly.close()
    cudnn = f", cuDNN {torch.backends.cudnn.version()}" if on_gpu else ""
    print(f"{hardware.device_name}, torch {torch.__version__}{cudnn}")
    chosen = f"{plan.amp}, cache {plan.cache}, fused layers {plan.fused_layers}, CUDA graph {plan.cuda_graphs}"
    warning = assembly.trainer.step.warning
    print(
        f"{recipe.name}: {recipe.training.batch_size} × {list(recipe.patch.size)}, {chosen}{f' ({warning})' if warning else ''}"
    )
    for name, rates in (("whole steps", whole), ("the network alone", alone)):
        middle = statistics.median(rates)
        print(f"{name:<18} {middle:9.1f} patches/s  ±{(max(rates) - min(rates)) / middle:.1%}")
    print(f"whole steps reach {statistics.median(whole) / statistics.median(alone):.1%} of the network's own rate")
    if on_gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / (1 << 30):.1f} GiB")
    if found is not None:
        print(found)
        for kernel, milliseconds, count in found.longest:
            print(f"   {milliseconds:7.3f} ms {count:4d}× {kernel[:150]}", file=sys.stderr)


def _rates(step: Callable[[], object], options: argparse.Namespace, patches: int, on_gpu: bool) -> list[float]:
    """Patches a second of each repeat."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(min(_WARM_UP, options.steps)):
        step()
    found = []
    for _ in range(options.repeats):
        wait()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        wait()
        found.append(patches * options.steps / (time.perf_counter() - began))
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
