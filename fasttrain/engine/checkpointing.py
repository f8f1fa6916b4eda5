"""Owns activation checkpointing: a network's blocks are computed again in the backward pass, so that less is kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from monai.networks.blocks.dynunet_block import UnetOutBlock
from monai.networks.layers.simplelayers import SkipConnection
from monai.networks.nets.dynunet import DynUNetSkipLayer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, SkipConnection, DynUNetSkipLayer)
"""What only holds blocks: it is looked into, and not computed again as a whole."""


def checkpoint_blocks(network: nn.Module) -> int:
    """Makes every block of `network` keep its input alone while training; returns how many blocks there are.

    A block is a module with weights that lies in the network itself or in its containers. Results stay the same, bit for bit on
    a CPU: dropout draws again what it drew, and running statistics are not moved twice.
    """
    blocks = list(_blocks(network, set()))
    for block in blocks:
        block.forward = functools.partial(_recomputed, block, block.forward)
    return len(blocks)


def _blocks(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if id(child) in seen or isinstance(child, UnetOutBlock):
            continue
        seen.add(id(child))
        if isinstance(child, _CONTAINERS):
            yield from _blocks(child, seen)
        elif any(True for _ in child.parameters()):
            yield child


def _recomputed(block: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    random = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules())
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=random,
        context_fn=functools.partial(_contexts, block),
        **named,
    )


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    return contextlib.nullcontext(), _still_statistics(block)


@contextlib.contextmanager
def _still_statistics(block: nn.Module) -> Iterator[None]:
    """Lets batch normalisation compute without moving its running statistics: the second pass is no second batch."""
    layers = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    kept = [(layer.running_mean, layer.running_var, layer.num_batches_tracked) for layer in layers]
    for layer, buffers in zip(layers, kept, strict=True):
        mean, var, count = buffers
        layer.running_mean = None if mean is None else mean.clone()
        layer.running_var = None if var is None else var.clone()
        layer.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            layer.running_mean, layer.running_var, layer.num_batches_tracked = buffers
