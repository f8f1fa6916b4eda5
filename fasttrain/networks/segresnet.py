"""Owns how MONAI's SegResNet is built from its spec."""

from __future__ import annotations

from typing import Any

from monai.networks.nets import SegResNet
from torch import nn

from fasttrain.recipe.network_spec import SEGRESNET_GROUPS, SegResNetSpec

_NORMS: dict[str, str | tuple[str, dict[str, Any]]] = {
    "group": ("GROUP", {"num_groups": SEGRESNET_GROUPS}),
    "instance": ("INSTANCE", {"affine": True}),
    "batch": "BATCH",
}


def build_segresnet(spec: SegResNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """MONAI's SegResNet (Myronenko 2018, "3D MRI brain tumor segmentation using autoencoder regularization").

    Initial weights are torch's default draw; norms have learnt scale and shift. Dropout follows the first convolution.
    """
    return SegResNet(**segresnet_arguments(spec, patch, channels, outputs))


def segresnet_arguments(spec: SegResNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> dict[str, Any]:
    """What MONAI's class is called with."""
    return {
        "spatial_dims": len(patch),
        "init_filters": spec.init_filters,
        "in_channels": channels,
        "out_channels": outputs,
        "blocks_down": spec.blocks_down,
        "blocks_up": spec.blocks_up,
        "norm": _NORMS[spec.norm],
        "dropout_prob": spec.dropout or None,
    }
