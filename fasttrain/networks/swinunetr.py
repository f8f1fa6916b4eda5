"""Owns how MONAI's Swin UNETR is built from its spec."""

from __future__ import annotations

import importlib.util
from typing import Any

from monai.networks.nets import SwinUNETR
from torch import nn

from fasttrain.errors import MachineError
from fasttrain.recipe.network_spec import SwinUNETRSpec


def build_swinunetr(spec: SwinUNETRSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """MONAI's Swin UNETR (Hatamizadeh et al. 2022) with windows of 7 tokens, without activation checkpointing of its own.

    Raises MachineError where einops is missing, which MONAI's class calls in its forward pass.
    """
    if importlib.util.find_spec("einops") is None:
        raise MachineError(
            "network.kind: swinunetr needs the package einops, which is not installed; pip install einops"
        )
    return SwinUNETR(**swinunetr_arguments(spec, patch, channels, outputs))


def swinunetr_arguments(spec: SwinUNETRSpec, patch: tuple[int, ...], channels: int, outputs: int) -> dict[str, Any]:
    """What MONAI's class is called with."""
    return {
        "spatial_dims": len(patch),
        "in_channels": channels,
        "out_channels": outputs,
        "feature_size": spec.feature_size,
        "depths": spec.depths,
        "num_heads": spec.num_heads,
        "norm_name": "batch" if spec.norm == "batch" else ("instance", {"affine": True}),
        "use_checkpoint": False,
    }
