"""Kernels compiled ahead in another process are those that a launch would compile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fasttrain.kernels import compiling, norm
from fasttrain.kernels.norm import After, Over
from fasttrain.kernels.rows import INTERPRETED

triton_there = importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not triton_there or INTERPRETED, reason="Triton is not installed, or interprets")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Triton compiles for an H100 without one, into a folder of the test's own."""
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    driver.set_active(compiling._NoGpu(90))
    yield tmp_path / "triton"
    driver._active = None


def normalised(channels: int) -> None:
    shape = (2, channels, 4, 4, 4)
    x = torch.randn(shape).to(torch.bfloat16).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    weight, bias = torch.ones(channels, requires_grad=True), torch.ones(channels, requires_grad=True)
    y = norm.normalise(x, weight, bias, Over(True), After(0.01))
    y.backward(torch.ones_like(y))


@pytest.fixture
def server():
    one = compiling.taken_server()
    assert one is not None
    yield one
    one.close()


@with_triton
def test_what_is_compiled_ahead_is_found_by_a_launch(no_gpu: Path, server: compiling.CompilingServer) -> None:
    with compiling.noting() as noted:
        normalised(32)
    assert [one.name for one in noted][:2] == ["moments_norm", "statistics_norm"]
    assert server.compile(list(noted), (9, 0), 2)
    made = {path.name for path in no_gpu.rglob("*.cubin")}
    assert made == {f"{one.name}.cubin" for one in noted}
    before = {path: path.stat().st_mtime_ns for path in no_gpu.rglob("*.cubin")}
    # Nothing can be launched here, but compiling comes before that
    with contextlib.suppress(Exception):
        normalised(32)
    assert {path: path.stat().st_mtime_ns for path in no_gpu.rglob("*.cubin")} == before


@with_triton
def test_noting_leaves_launches_alone_afterwards(no_gpu: Path) -> None:
    with compiling.noting() as noted:
        normalised(16)
    assert noted
    # Where nothing is noted, a launch compiles and then needs a driver
    with pytest.raises(Exception):  # noqa: B017
        normalised(16)


@with_triton
def test_a_kernel_that_cannot_be_compiled_is_told(no_gpu: Path, server: compiling.CompilingServer) -> None:
    assert not server.compile([compiling.Noted("fasttrain.kernels.norm_triton", "moments_norm", "{}")], (9, 0), 1)
    with compiling.noting() as noted:
        normalised(64)
    assert server.compile(list(noted), (9, 0), 1), "the server goes on"


@with_triton
def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys; from fasttrain.kernels import compiling; s = compiling.taken_server(); "
        "print(s._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(600):
        if not alive(pid):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "0.05"], timeout=1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(triton_there, reason="Triton is installed")
def test_without_triton_there_is_no_server() -> None:
    compiling.start_early()
    assert compiling.taken_server() is None


def test_the_server_needs_no_torch() -> None:
    program = "import fasttrain.kernels.compiling, json, sys; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ}, check=True
    )
    assert json.loads(done.stdout) is False
