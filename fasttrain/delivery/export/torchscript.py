"""Owns the export to TorchScript, by tracing."""

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
"""Of the extra files in it: what goes in and what comes out."""


def write(model: PlainModel, path: Path) -> None:
    """Writes `path`; raises what torch raises where it cannot follow the network."""
    with torch.no_grad(), warnings.catch_warnings():
        # Shapes are asked for on the way, and are those of a patch in any case
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model.network, model.example, check_trace=False)
        whole = io.BytesIO()
        torch.jit.save(traced, whole, _extra_files={DESCRIPTION: json.dumps(model.described())})
    # torch's own writing of files ends the process where the disk is full
    path.write_bytes(whole.getbuffer())


def opened(path: Path) -> Callable[[Tensor], Tensor]:
    """The network in the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network: Callable[[Tensor], Tensor] = torch.jit.load(str(path), map_location="cpu")
    return network


def difference(model: PlainModel, path: Path) -> float:
    """How far the file's answers lie from the network's."""
    return largest_difference(model, opened(path))
