"""Owns the settings of torch's GPU allocator, which reads them from the environment when it is first used, or is told later."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.10, and the one before."""
_GROWING = "expandable_segments:True"
_FIXED = "expandable_segments:False"


def allocator_setting(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """The variable by which the user set the allocator, with its value; None where nobody but fasttrain did."""
    found = ((name, environ.get(name)) for name in _VARIABLES)
    return next((f"{name}={value}" for name, value in found if value and value != _GROWING), None)


def expand_segments(wanted: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Asks for segments that grow, so that memory of one shape can serve another, or takes that back, for what is allocated from
    now on; the environment tells it to processes that are begun later.
    """
    for name in _VARIABLES:
        if wanted:
            environ[name] = _GROWING
        elif environ.get(name) == _GROWING:
            del environ[name]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # Too late for the environment: so it is where ranks have met by NCCL. The name since torch 2.10, and the one before
        tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
            torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None
        )
        if tell is not None:
            tell(_GROWING if wanted else _FIXED)


def gpu_room_bytes(device: torch.device | int) -> int:
    """What this process may still ask of the GPU, beside what torch has reserved already: what the card has free, or less where
    the process was given a share of it (`torch.cuda.set_per_process_memory_fraction`, or `per_process_memory_fraction` in the
    allocator's settings). Raises RuntimeError where the GPU answers no more.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    # torch tells the share since 2.8
    share = torch.cuda.get_per_process_memory_fraction(device)
    return max(min(free, int(share * total) - torch.cuda.memory_reserved(device)), 0)
