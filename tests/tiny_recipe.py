"""A recipe so small that a run takes seconds."""

from typing import Any

TINY: dict[str, Any] = {
    "data.source.cases": 6,
    "data.split.validation": 2,
    "data.spacing": [5.0, 5.0, 5.0],
    "data.workers": 0,
    "patch.size": [16, 16, 16],
    "augment.flip": {"probability": 0.5},
    "augment.rotate": {"probability": 0.5},
    "network": {"kind": "dynunet", "features": [4, 8, 8], "strides": [2, 2], "dropout": 0.1},
    "training.epochs": 4,
    "training.iterations_per_epoch": 5,
    "training.batch_size": 2,
    "validation.every": 1,
    "output.log_every": 1,
    "output.plots": False,
    "output.pictures": "off",
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.threads": 1,
}
