"""Owns where the tests of `fasttrain.data` find real volumes; builders are in `data_builders`, a name no other folder has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """The folder of a real data set by name; skips where it is absent."""
    base = Path(os.environ.get("FASTTRAIN_TEST_DATA", _CHECKOUT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        folder = base / name
        if not folder.exists():
            pytest.skip(f"no real data at {folder}; set FASTTRAIN_TEST_DATA")
        return folder

    return find


@pytest.fixture(autouse=True)
def _fresh_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the volumes that another one stored."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
