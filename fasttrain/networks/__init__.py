"""Owns the list of networks and builds the one a recipe names.

Every network takes [batch, channel, *spatial] floats. In eval mode it returns one tensor of logits [batch, class,
*spatial]. In train mode it returns the same, or with deep supervision a tuple of logits from the finest to the
coarsest head, each at the resolution of its own stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fasttrain.networks.dynunet import build_dynunet
from fasttrain.networks.unet import build_unet

if TYPE_CHECKING:
    from torch import nn

    from fasttrain.recipe.network_spec import NetworkSpec

NETWORKS: dict[str, Callable[..., nn.Module]] = {"unet": build_unet, "dynunet": build_dynunet}


def build_network(spec: NetworkSpec, dimensions: int, channels: int, classes: int) -> nn.Module:
    """The network of `spec` in `dimensions` (2 or 3).

    `channels` are inputs, `classes` outputs, the background among them. Weights are drawn from torch's global CPU
    generator: seed it first where they must be repeatable. Raises RecipeError where no network can be built of `spec`.
    """
    return NETWORKS[spec.kind](spec, dimensions, channels, classes)
