"""Owns the number of CPU threads: of OpenMP, MKL, OpenBLAS, NumExpr and torch, set before torch is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from fasttrain.machine.limits import cpu_limit
from fasttrain.machine.visible_devices import VARIABLE, hides_all
from fasttrain.wording import counted

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
MOST_THREADS_BESIDE_A_GPU = 4


def thread_count(setting: int | str, on_gpu: bool, sharing: int = 1) -> tuple[int, str]:
    """The number of threads for a recipe's `acceleration.threads`, and why. sharing: so many processes share the CPUs.

    A GPU run computes little on the CPU: more than a few threads there only compete with the loader's workers.
    """
    if isinstance(setting, int):
        return setting, "set in the recipe"
    cpus = max(cpu_limit() // sharing, 1)
    if on_gpu:
        return min(cpus, MOST_THREADS_BESIDE_A_GPU), f"a GPU run needs few; {counted(cpus, 'CPU')} may be used"
    shared = f", a share of one of {sharing} processes" if sharing > 1 else ""
    return cpus, f"{counted(cpus, 'CPU')} may be used, by affinity and cgroup quota{shared}"


def limit_threads(count: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets every thread pool to `count`. The pools read the environment when their library loads, so call it before torch."""
    for name in THREAD_VARIABLES:
        environ[name] = str(count)
    wait_without_spinning(environ)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)
    # The inter-op pool may be sized only once and only before its first use; it is left alone here because nothing in a
    # training step uses it.


def wait_without_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Threads of a pool that wait for one another give their CPU away, unless the user says otherwise; read when torch is loaded.

    Two runs that share CPUs, whose pools spin by default, took five times as long as one after the other; one alone is no slower.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def probably_on_gpu(device: str) -> bool:
    """Whether a run on `--device` will use a GPU, found out without loading torch; the plan finds out for certain."""
    if device == "auto":
        return os.path.exists("/dev/nvidiactl") and not hides_all(os.environ.get(VARIABLE))
    return device.startswith("cuda")
