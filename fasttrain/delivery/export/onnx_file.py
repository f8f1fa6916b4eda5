"""Owns the export to ONNX, and its answers by onnxruntime."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fasttrain.delivery.export.agreement import largest_difference
from fasttrain.delivery.export.plain import PlainModel

OPSET = 18
MOST_BYTES = 2 << 30
"""Of one file; protobuf holds no more."""


def write(model: PlainModel, path: Path) -> None:
    """Writes `path`, one file with its weights, for any number of windows; raises what torch raises."""
    import onnx

    _keep_to_itself()
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with _quiet("torch.onnx", "onnxscript"):
            torch.onnx.export(
                model.network,
                (model.example,),
                str(path),
                input_names=["image"],
                output_names=["logits"],
                opset_version=OPSET,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
                external_data=False,
                verbose=False,
            )
    written = onnx.load(str(path))
    for key, value in model.described().items():
        entry = written.metadata_props.add()
        entry.key, entry.value = f"fasttrain.{key}", value if isinstance(value, str) else json.dumps(value)
    onnx.checker.check_model(written)
    onnx.save(written, str(path))


def opened(path: Path) -> Callable[[Tensor], Tensor]:
    """The network in the file, run by onnxruntime on the CPU."""
    _keep_to_itself()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda windows: torch.from_numpy(session.run(["logits"], {"image": windows.contiguous().numpy()})[0])


def _keep_to_itself() -> None:
    """Before onnxruntime is loaded: from 1.32 on it tells its maker of its use, for which it leaves files behind."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def difference(model: PlainModel, path: Path) -> float:
    """How far the file's answers lie from the network's."""
    return largest_difference(model, opened(path))


@contextlib.contextmanager
def _quiet(*names: str):  # type: ignore[no-untyped-def]
    loggers = [logging.getLogger(name) for name in names]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
