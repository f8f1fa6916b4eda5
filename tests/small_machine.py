"""Runs a script in a process of its own on a machine that is made small: little shared memory, few open files."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRAINING = """
    import json, sys
    sys.path.insert(0, {tests!r})
    from tiny_recipe import TINY
    from fasttrain import load_recipe, train
    from fasttrain.errors import FasttrainError
    class Told:
        def on_event(self, event):
            if type(event).__name__ == "RunStarted":
                print(json.dumps({{name: [value, reason] for name, value, reason in event.decisions}}), flush=True)
        def close(self): ...
    try:
        train(load_recipe("demo", {{**TINY, **{more!r}}}), data={data!r}, run={run!r}, device="cpu", observers=[Told()])
    except FasttrainError as error:
        print(error)
        sys.exit(error.exit_code)
"""


def training(data: Path, run: Path, **more: object) -> str:
    """A script that trains the tiny recipe, prints the plan's decisions as JSON and ends with the exit code."""
    settings = {key.replace("__", "."): value for key, value in more.items()}
    return textwrap.dedent(TRAINING).format(tests=str(TESTS), more=settings, data=str(data), run=str(run))


def run_with(script: str, before: str = "", namespace: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a Python script after the shell's `before`; `namespace`: in a mount namespace of its own, or skips."""
    command = f"{before} exec {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    words = ["sh", "-c", command]
    if namespace:
        words = [*_unshared(), *words]
    return subprocess.run(words, capture_output=True, text=True, cwd=TESTS.parent, timeout=200)


def shared_memory(size: str) -> str:
    """The shell's words that put a tmpfs of `size` in the place of /dev/shm."""
    return f"mount -t tmpfs -o {size} tmpfs /dev/shm &&"


def _unshared() -> list[str]:
    words = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    try:
        tried = subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"there is no unshare here ({error})")
    if tried.returncode:
        pytest.skip(f"a private mount of /dev/shm is not permitted here: {tried.stderr.strip()}")
    return words
