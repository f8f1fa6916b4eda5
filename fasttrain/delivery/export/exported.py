"""Owns the export by `torch.export`."""

from __future__ import annotations

import io
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
        whole = io.BytesIO()
        torch.export.save(program, whole, extra_files={DESCRIPTION: json.dumps(model.described())})
    # torch's own writing of files ends the process where the disk is full
    path.write_bytes(whole.getbuffer())


def opened(path: Path) -> Callable[[Tensor], Tensor]:
    """The network in the file."""
    # Of a name that does not end in .pt2 torch warns that it cannot load it, and loads it
    network: Callable[[Tensor], Tensor] = torch.export.load(io.BytesIO(path.read_bytes())).module()
    return network


def difference(model: PlainModel, path: Path) -> float:
    """How far the file's answers lie from the network's."""
    return largest_difference(model, opened(path))
