"""Owns the look at what makes kernels fast: cuDNN's version, and a compile that is really made, in C and by Triton."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fasttrain.errors import EXIT_DONE
from fasttrain.machine.compiler import c_compiler, missing_for_c, missing_for_compile
from fasttrain.machine.cudnn import SLOW, is_slow, newer_cudnn, version_text
from fasttrain.machine.diagnosis.finding import Finding, Scene, in_a_line
from fasttrain.machine.hardware import cudnn_of_torch
from fasttrain.own_process import start_own

_C_SECONDS = 30.0
_TRITON_SECONDS = 90.0
_COSTS = "training runs without fasttrain's own kernels and without volumes in the GPU's memory, which is slower"
_TOOLS = "apt-get update && apt-get install -y gcc libc6-dev python3-dev"
_SOURCE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
"""


def cudnn(scene: Scene) -> Iterator[Finding]:
    """cuDNN, where there is a GPU that uses it."""
    if scene.gpus:
        yield cudnn_finding(cudnn_of_torch())


def cudnn_finding(version: int | None) -> Finding:
    """cuDNN by the number that torch gives it."""
    if version is None:
        told = "torch finds no cuDNN that it can use: convolutions are slow"
        return Finding("cudnn", "warning", told, "unset LD_LIBRARY_PATH; pip install --force-reinstall torch")
    if is_slow(version):
        return Finding("cudnn", "warning", f"{version_text(version)}: {SLOW}", newer_cudnn())
    return Finding("cudnn", "ok", version_text(version))


def compiler(scene: Scene) -> Iterator[Finding]:
    """A C extension of Python, compiled as Triton compiles its launchers; on a machine without a GPU nothing needs it."""
    missing = missing_for_c()
    failure = missing or c_failure()
    if failure is None:
        yield Finding("compiler", "ok", f"{c_compiler()} compiled a C extension against Python's headers")
    elif scene.gpus:
        yield Finding("compiler", "warning", f"{failure}; {_COSTS}", _TOOLS)
    else:
        yield Finding("compiler", "ok", f"{failure}; nothing needs it without a GPU")
    if scene.gpus and failure is None:
        yield triton_finding(missing_for_compile() or triton_failure())


def triton_finding(failure: str | None) -> Finding:
    """Triton, after a kernel was compiled and run, or by what it lacks."""
    if failure is None:
        return Finding("triton", "ok", "compiled a kernel, which ran and computed rightly")
    return Finding("triton", "warning", f"{failure}; {_COSTS}", "pip install --force-reinstall torch triton")


def c_failure() -> str | None:
    """Why a C extension cannot be compiled here; None where it can. What is compiled is not run and not kept."""
    with tempfile.TemporaryDirectory(prefix="fasttrain-doctor-", ignore_cleanup_errors=True) as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_SOURCE, encoding="utf-8")
        command = [c_compiler() or "gcc", str(source), "-shared", "-fPIC", "-o", str(source.with_suffix(".so"))]
        command += ["-I", sysconfig.get_paths()["include"]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_C_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C compiler does not work ({in_a_line(error)})"
    lines = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
    told = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0].strip()
    return None if done.returncode == 0 else f"the C compiler {command[0]} fails ({told[:200]})"


def triton_failure() -> str | None:
    """Why a Triton kernel cannot be compiled or run here; None where it can. It is tried in a process of its own."""
    with tempfile.TemporaryFile() as errors:
        process = start_own("fasttrain.machine.diagnosis.doubling_triton", stderr=errors)
        try:
            told, _ = process.communicate(timeout=_TRITON_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"Triton compiled no kernel within {_TRITON_SECONDS:.0f} s"
        if process.returncode == EXIT_DONE:
            return None
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return f"Triton fails to compile or to run a kernel ({(told.decode(errors='replace').strip() or last)[:200]})"
