"""Owns the work of a patch, counted, and what the device does at most, measured: so computing and bandwidth are told apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fasttrain.errors import ran_out_of_memory
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By `amp`; float32 where it is off."""
_SIDE_ON_GPU, _SIDE_ON_CPU = 8192, 1024
_COPIED_ON_GPU, _COPIED_ON_CPU = 256 << 20, 64 << 20
_REPEATS = 7
_PATCHES = 2
"""A norm of one voxel a patch has nothing to learn from with one."""


def ceilings_of(recipe: Recipe, amp: str, device: torch.device) -> dict[str, float]:
    """`patch_flops` and `patch_bytes` of a step, `peak_flops` and `peak_bandwidth` of the device a second; {} where a network
    cannot be counted or memory is too short to measure.
    """
    try:
        return {**work_of(recipe, amp), **peaks_of(DTYPES.get(amp, torch.float32), device)}
    except Exception as error:
        # Some networks do what made tensors cannot follow; what holds the rate back is then told less exactly
        if isinstance(error, RuntimeError | NotImplementedError | TypeError | ValueError) or ran_out_of_memory(error):
            return {}
        raise


def work_of(recipe: Recipe, amp: str) -> dict[str, float]:
    """Floating point operations, and bytes read and written, of the network's forward and backward pass for one patch.

    Counted by operations on tensors without content (multiply and add are two), which take no memory. The bytes are those of
    layers run one by one: fused ones move fewer.
    """
    with torch.random.fork_rng(devices=[]):
        network = build_network(recipe.network, recipe.patch.size, recipe.input_channels, recipe.output_channels)
        network.to("meta", DTYPES.get(amp, torch.float32)).train()
        shape = (_PATCHES, recipe.input_channels, *recipe.patch.size)
        image = torch.empty(shape, dtype=DTYPES.get(amp), device="meta")
        with FlopCounterMode(display=False) as flops, _Bytes() as moved:
            _passes(network, image)
    return {"patch_flops": flops.get_total_flops() / _PATCHES, "patch_bytes": moved.count / _PATCHES}


def _passes(network: nn.Module, image: Tensor) -> None:
    answer = network(image)
    heads = answer if isinstance(answer, tuple | list) else (answer,)
    torch.autograd.backward([head.sum() for head in heads])


class _Bytes(TorchDispatchMode):
    """Counts what operations read and write; a view does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        results = func._schema.returns
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in results):
            flat = torch.utils._pytree.tree_leaves((args, kwargs, answer))
            self.count += sum(one.numel() * one.element_size() for one in flat if isinstance(one, Tensor))
        return answer


def peaks_of(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """What the device reaches at most a second: operations in a product of matrices, bytes read and written in a copy.

    Each is the median of a few, and `_spread` half the range of these as a share of it: on a CPU other processes come and go.
    """
    on_gpu = device.type == "cuda"
    side, size = (_SIDE_ON_GPU, _COPIED_ON_GPU) if on_gpu else (_SIDE_ON_CPU, _COPIED_ON_CPU)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if on_gpu else []):
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(left)
        computing = _seconds(lambda: torch.mm(left, right, out=product), device)
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        copying = _seconds(lambda: target.copy_(source), device)
    return {
        "peak_flops": 2.0 * side**3 / statistics.median(computing),
        "peak_flops_spread": _spread(computing),
        "peak_bandwidth": 2.0 * size / statistics.median(copying),
        "peak_bandwidth_spread": _spread(copying),
    }


def _spread(seconds: list[float]) -> float:
    return (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)


def _seconds(work: Callable[[], object], device: torch.device) -> list[float]:
    """Of a few calls, the first ones left out."""
    taken = []
    for _ in range(_REPEATS + 2):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            torch.cuda.synchronize(device)
            taken.append(first.elapsed_time(last) / 1000)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return taken[2:]
