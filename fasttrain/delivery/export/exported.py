"""Owns the export by `torch.export`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fasttrain.delivery.export.agreement import largest_difference
from fasttrain.delivery.export.plain import PlainModel

DESCRIPTION = "fasttrain.json"


def write(model: PlainModel, path: Path) -> None:
    """Writes `path` for any number of windows; raises what torch raises where it cannot follow the network."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            model.network, (model.example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},)
        )
        torch.export.save(program, str(path), extra_files={DESCRIPTION: json.dumps(model.described())})


def opened(path: Path) -> Callable[[Tensor], Tensor]:
    """The network in the file."""
    network: Callable[[Tensor], Tensor] = torch.export.load(str(path)).module()
    return network


def difference(model: PlainModel, path: Path) -> float:
    """How far the file's answers lie from the network's."""
    return largest_difference(model, opened(path))
