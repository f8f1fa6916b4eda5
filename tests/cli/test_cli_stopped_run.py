"""A real run with loader workers that is told to stop: the short form of scripts/acceptance/stop_anywhere.py."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "acceptance" / "stop_anywhere.py"


@pytest.fixture(scope="module")
def anywhere() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stop_anywhere", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stop_anywhere"] = module
    spec.loader.exec_module(module)
    return module


def test_a_run_with_workers_ends_with_143_and_goes_on_with_the_next_step(anywhere: ModuleType, tmp_path: Path) -> None:
    more = ("training.epochs=2",)
    run = anywhere.Run(tmp_path / "run", tmp_path / "data", more)
    # On a machine that others use as well, a step may take what it takes
    anywhere.stopped(run, anywhere.at_step(7), (signal.SIGTERM,), 143, seconds=20.0)
    before = max(anywhere.losses(run.folder))
    assert before < 10, "it was stopped after its last step: the test proved nothing"
    again = anywhere.Run(tmp_path / "run", tmp_path / "data", resume=True)
    again.wait()
    assert f"resumed at step {before}" in again.log.read_text()
    steps = [event["step"] for event in again.events() if event["event"] == "StepLogged"]
    assert steps == list(range(1, 11)), "each step once, in order"
