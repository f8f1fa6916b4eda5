"""Two cards, as the stand-in for the driver's library in `fake_nvml` shows them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).with_name("fake_nvml")
FIRST = "GPU-aaaa1111-0000-0000-0000-000000000001"
SECOND = "GPU-bbbb2222-0000-0000-0000-000000000002"
INSTANCES = ["MIG-cccc3333-0000-0000-0000-000000000003", "MIG-dddd4444-0000-0000-0000-000000000004"]
CARDS = [
    {"uuid": FIRST, "name": "Fake H100", "busy": 11, "held": 1.5},
    {"uuid": SECOND, "name": "Fake H100", "busy": 97, "held": 42.0, "processes": [4711]},
]
SPLIT = [{**CARDS[0], "instances": INSTANCES}]


def settings(cards: list[dict[str, Any]] | None = None, **more: Any) -> str:
    """The text of $FAKE_NVML."""
    return json.dumps({"cards": CARDS if cards is None else cards, **more})


def install(monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any]] | None = None, **more: Any) -> ModuleType:
    """Puts the stand-in in the place of pynvml in this process."""
    spec = importlib.util.spec_from_file_location("pynvml", FOLDER / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("FAKE_NVML", settings(cards, **more))
    return module
