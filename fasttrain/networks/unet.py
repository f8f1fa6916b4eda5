"""Owns how MONAI's UNet is built from its spec."""

from __future__ import annotations

from typing import Any

from monai.networks.nets import UNet
from torch import nn

from fasttrain.recipe.network_spec import UNetSpec, per_axis

_ACTIVATIONS: dict[str, str | tuple[str, dict[str, Any]]] = {
    "relu": ("RELU", {"inplace": True}),
    "prelu": "PRELU",
    "leaky_relu": ("LEAKYRELU", {"inplace": True, "negative_slope": 0.01}),
}


def build_unet(spec: UNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """MONAI's UNet (Kerfoot et al. 2019, "Left-ventricle quantification using residual U-Net") with kernels of 3.

    Norms and initial weights are MONAI's: an instance norm without learnt scale, convolutions with torch's default
    draw.
    """
    return UNet(**unet_arguments(spec, patch, channels, outputs))


def unet_arguments(spec: UNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> dict[str, Any]:
    """What MONAI's class is called with."""
    dimensions = len(patch)
    return {
        "spatial_dims": dimensions,
        "in_channels": channels,
        "out_channels": outputs,
        "channels": spec.features,
        "strides": tuple(per_axis(stride, dimensions) for stride in spec.strides),
        "num_res_units": spec.residual_units,
        "act": _ACTIVATIONS[spec.activation],
        "norm": spec.norm.upper(),
        "dropout": spec.dropout,
    }
