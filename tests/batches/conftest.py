"""Owns tests that run beside pytest and not in it: torch's handler of a worker's death raises wherever a process is then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

_INSIDE = "FASTTRAIN_TESTS_ALONE"
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)", re.MULTILINE)
_outcomes: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kills_workers: runs in a process of its own, which dies of a stray signal alone"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("kills_workers") is None or _INSIDE in os.environ:
        return None
    told = ""
    if pyfuncitem.nodeid not in _outcomes:
        # All at once, since to import torch takes longer than a test; alone where another one ended the process
        told = _run([item.nodeid for item in pyfuncitem.session.items if item.get_closest_marker("kills_workers")])
    if pyfuncitem.nodeid not in _outcomes:
        told = _run([pyfuncitem.nodeid])
    outcome = _outcomes.get(pyfuncitem.nodeid, told)
    if outcome:
        pytest.fail(outcome, pytrace=False)
    return True


def _run(names: Sequence[str]) -> str:
    """Notes the outcome of each test, "" where it passed, and gives what pytest said."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--rootdir={root}", *names]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env={**os.environ, _INSIDE: "1"}, timeout=280
    )
    told = f"{done.stdout}\n{done.stderr}"[-20000:]
    for outcome, name in _OUTCOME.findall(done.stdout):
        _outcomes[name] = "" if outcome == "PASSED" else told
    return told or f"pytest ended with {done.returncode}"
