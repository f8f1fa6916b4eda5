"""Owns a Triton kernel that is compiled and run once to see whether that works here, in a process of its own."""

from __future__ import annotations

import os
import sys
import tempfile

import triton
import triton.language as tl

_COUNT = 100


@triton.jit
def doubling(source, target, count, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside) * 2, mask=inside)


def doubles(device: str) -> bool:
    """Whether the kernel's result on a device is right, with nothing written behind its end."""
    import torch

    numbers = torch.arange(_COUNT, dtype=torch.float32, device=device)
    results = torch.full((128,), -1.0, device=device)
    doubling[(2,)](numbers, results, _COUNT, 64)
    return bool((results[:_COUNT] == numbers * 2).all()) and bool((results[_COUNT:] == -1).all())


def failure(device: str) -> str | None:
    """Why it cannot be compiled and run, None where it can."""
    with tempfile.TemporaryDirectory(prefix="fasttrain-doctor-", ignore_cleanup_errors=True) as cache:
        # What lies in the user's cache would not be compiled again
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            return None if doubles(device) else "the kernel's result is wrong"
        except Exception as error:
            return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    told = failure(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    sys.stdout.write(told or "")
    sys.exit(0 if told is None else 1)
