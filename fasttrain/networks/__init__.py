"""Owns the list of networks and builds the one a recipe names.

Every network takes [batch, channel, *spatial] floats. In eval mode it returns one tensor of logits [batch, class,
*spatial]. In train mode it returns the same, or with deep supervision a tuple of logits from the finest to the
coarsest head, each at the resolution of its own stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fasttrain.errors import RecipeError
from fasttrain.networks.by_name import MainHead, build_by_name, by_name_arguments
from fasttrain.networks.dose_unet import build_dose_unet
from fasttrain.networks.dynunet import build_dynunet, dynunet_arguments
from fasttrain.networks.segresnet import build_segresnet, segresnet_arguments
from fasttrain.networks.swinunetr import build_swinunetr, swinunetr_arguments
from fasttrain.networks.unet import build_unet, unet_arguments
from fasttrain.recipe.faults import dotted

if TYPE_CHECKING:
    from torch import nn

    from fasttrain.recipe.network_spec import NetworkSpec

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "unet": build_unet,
    "dynunet": build_dynunet,
    "segresnet": build_segresnet,
    "swinunetr": build_swinunetr,
    "dose_unet": build_dose_unet,
    "monai": build_by_name,
}


def build_network(spec: NetworkSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """The network of `spec` for patches of `patch` voxels, 2 axes or 3.

    `channels` are inputs; `outputs` are the classes, the background among them, or 1 (`Recipe.output_channels`). Weights are
    drawn from torch's global CPU generator: seed it first where they must be repeatable. Raises RecipeError where no network
    can be built of `spec`, MachineError where a package for it is missing.
    """
    faults = [f"{dotted(('network', *path))}: {text}" for path, text in spec.faults(len(patch))]
    if faults:
        raise RecipeError(faults)
    return NETWORKS[spec.kind](spec, patch, channels, outputs)


_ARGUMENTS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "unet": ("UNet", unet_arguments),
    "dynunet": ("DynUNet", dynunet_arguments),
    "segresnet": ("SegResNet", segresnet_arguments),
    "swinunetr": ("SwinUNETR", swinunetr_arguments),
}


def monai_definition(
    spec: NetworkSpec, patch: tuple[int, ...], channels: int, outputs: int
) -> tuple[str, dict[str, Any]] | None:
    """The name of the class in `monai.networks.nets` that takes the weights of `build_network` as they are, and its arguments.

    None for a network that is none of MONAI's, or whose main output is not what MONAI's class returns.
    """
    if spec.kind == "monai":
        if isinstance(build_network(spec, patch, channels, outputs), MainHead):
            return None
        return spec.name, by_name_arguments(spec, patch, channels, outputs)
    if spec.kind not in _ARGUMENTS:
        return None
    name, arguments = _ARGUMENTS[spec.kind]
    return name, arguments(spec, patch, channels, outputs)
