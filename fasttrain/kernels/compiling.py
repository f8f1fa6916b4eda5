"""Owns compiling Triton kernels ahead of their first launch, in processes of their own, so that it takes a machine's CPUs and no
turn of the main process; without it each kernel is compiled where it is launched, one after the other.

What is to be compiled is found by a rehearsal: the code that launches kernels runs once, and each launch that would compile is
noted and left out. The notes, Triton's own `specialization_data`, go to a process that loads Triton and nothing else, and the
results reach this one by way of Triton's cache folder. Whatever fails here is compiled later as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.own_process import start_own

_MOST_PROCESSES = 12
_WARP = 32


class Noted(NamedTuple):
    """A kernel with one set of types and constants; `data` is what `JITFunction.preload` takes."""

    module: str
    name: str
    data: str


@contextlib.contextmanager
def noting() -> Iterator[dict[Noted, None]]:
    """A scope in which launches of kernels that are not compiled yet are noted, in their order, and not made."""
    import triton

    found: dict[Noted, None] = {}

    def note(*_: Any, fn: Any, compile: dict[str, Any], **__: Any) -> bool:
        found[Noted(fn.module, fn.name.rpartition(".")[2], compile["specialization_data"])] = None
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = before


class CompilingServer:
    """A process that loads Triton, waits for notes, and forks as many processes as there are CPUs to compile them.

    It is to be started before torch is loaded, so that it is ready when the notes are: loading Triton and its key takes seconds
    on a slow disk, and a fork of it takes none. It ends with this process.
    """

    def __init__(self) -> None:
        self._process = start_own("fasttrain.kernels.compiling")

    def compile(self, noted: list[Noted], capability: tuple[int, int], processes: int) -> bool:
        """Compiles the kernels for a GPU of a compute capability into the folder of $TRITON_CACHE_DIR; whether all were."""
        count = max(min(processes, len(noted), _MOST_PROCESSES), 1)
        request = {
            "cache": os.environ.get("TRITON_CACHE_DIR"),
            "capability": capability[0] * 10 + capability[1],
            "shares": [noted[number::count] for number in range(count)],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip() == b"true"

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        self._process.wait()


_early: CompilingServer | None = None


def start_early() -> None:
    """Starts the server that `taken_server` will give; does nothing where Triton is not installed or processes cannot fork."""
    global _early
    if _early is None and hasattr(os, "fork") and importlib.util.find_spec("triton") is not None:
        with contextlib.suppress(OSError):
            _early = CompilingServer()
            atexit.register(stop_early)


def taken_server() -> CompilingServer | None:
    """The server that was started early, or a new one; None where there can be none. The caller closes it."""
    global _early
    start_early()
    server, _early = _early, None
    return server


def stop_early() -> None:
    """Ends the early server where nobody took it."""
    global _early
    if _early is not None:
        _early.close()
        _early = None


def sources_digest() -> str:
    """Of Triton's version and of all kernels of fasttrain as they are written."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*_triton.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class _NoGpu:
    """Stands in for Triton's driver where kernels are compiled and never launched."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Any: kernels are kept by device, and none is used."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def _serve() -> None:
    with contextlib.suppress(Exception):
        _load()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["cache"] is not None:
            os.environ["TRITON_CACHE_DIR"] = request["cache"]
        children = [_forked(share, request["capability"]) for share in request["shares"]]
        codes = [os.waitpid(child, 0)[1] for child in children]
        sys.stdout.write(f"{json.dumps(not any(codes))}\n")
        sys.stdout.flush()


def _load() -> None:
    """All that compiling needs, the digest of Triton itself that is a part of every key, and Triton's own part in C."""
    import triton.backends.nvidia.driver
    import triton.runtime.cache

    for source in Path(__file__).parent.glob("*_triton.py"):
        importlib.import_module(f"fasttrain.kernels.{source.stem}")
    triton.runtime.cache.triton_key()
    with contextlib.suppress(Exception):
        # Linked to the GPU's driver, as the launchers are
        triton.backends.nvidia.driver.CudaUtils()


def _forked(share: list[list[str]], capability: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _compile([Noted(*one) for one in share], capability)
        code = 0
    finally:
        # Nothing of the parent's is to be closed or flushed twice
        os._exit(code)


def _compile(noted: list[Noted], capability: int) -> None:
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    driver.set_active(_NoGpu(capability))
    for module, name, data in noted:
        kernel = getattr(importlib.import_module(module), name).preload(data)
        # The C function that launches it, which gcc makes; it is linked to the GPU's driver, which a test's machine has not
        with contextlib.suppress(Exception):
            CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    _serve()
