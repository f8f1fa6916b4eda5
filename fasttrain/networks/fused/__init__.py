"""Owns the channels-last form of a network: the same parameters under the same names, with norms, activations and the
convolutions that cuDNN is slow at computed by fasttrain's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fasttrain.networks.fused.blocks import fuse_basic_block, fuse_pre_activation, fuse_residual_unit
from fasttrain.networks.fused.convolutions import fuse_convolution, fuse_normed_convolution
from fasttrain.networks.fused.norms import fuse_adn

FUSED_KINDS = ("unet", "dynunet", "segresnet")
"""Of `network.kind`: those made of blocks that have a fused form."""
FORMS: tuple[Callable[[nn.Module], nn.Module | None], ...] = (
    fuse_basic_block,
    fuse_residual_unit,
    fuse_pre_activation,
    fuse_normed_convolution,
    fuse_adn,
    fuse_convolution,
)
"""Each takes a module and gives its fused form, or None where it has none for it; outer modules come before what is inside."""


def fuse(network: nn.Module) -> int:
    """Puts fused forms in the place of torch's and MONAI's modules, in place; returns how many.

    What is not known stays as it is. Keys of the state_dict, parameters and what is computed do not change. The network and what
    it takes should then lie channels-last, which `fuse` leaves to the caller.
    """
    replaced = 0
    for name, child in list(network.named_children()):
        form = next((form for one in FORMS if (form := one(child)) is not None), None)
        if form is not None and form is not child:
            setattr(network, name, form)
        replaced += form is not None
        replaced += fuse(child if form is None else form)
    return replaced
