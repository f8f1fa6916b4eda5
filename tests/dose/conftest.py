"""A made set of OpenKBP patients, and the recipe for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dose_patients import write_patient

from fasttrain import load_recipe

SMALL = {
    "data.spacing": [16.0, 16.0, 10.0],
    "data.workers": 0,
    "patch.size": [32, 32, 32],
    "network.features": [4, 8],
    "training.epochs": 2,
    "training.iterations_per_epoch": 3,
    "validation.every": 1,
    "optimizer.learning_rate": 3e-3,
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.threads": 1,
}


@pytest.fixture(scope="session")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two patients for training, one for validation."""
    root = tmp_path_factory.mktemp("openkbp")
    write_patient(root / "train-pats" / "pt_1", 1)
    write_patient(root / "train-pats" / "pt_2", 2)
    write_patient(root / "validation-pats" / "pt_201", 3)
    return root


@pytest.fixture(scope="session")
def small():
    """Resolves the recipe at a spacing of 16 mm, with further settings."""

    def resolved(**more: object):
        return load_recipe("openkbp", {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}})

    return resolved


@pytest.fixture(scope="session")
def real_patient() -> Path:
    """A patient of the public set, which reaches 19798 in its CT."""
    base = Path(os.environ.get("FASTTRAIN_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    folder = base / "openkbp" / "train-pats" / "pt_6"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set FASTTRAIN_TEST_DATA")
    return folder
