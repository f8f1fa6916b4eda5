"""Owns how MONAI's DynUNet is built from its spec, and the form of it whose heads keep their own resolution."""

from __future__ import annotations

from typing import Any

from monai.networks.nets import DynUNet
from torch import Tensor, nn

from fasttrain.recipe.network_spec import DynUNetSpec, per_axis


class NativeHeadsDynUNet(DynUNet):
    """MONAI's DynUNet whose deep-supervision heads come as a tuple, each at the resolution of its stage.

    Parameters, their state_dict keys and the main output are those of MONAI's class, so weights pass either way.
    MONAI's own forward interpolates every head to full size and stacks them, and it collects them in a list that its
    skip layers share: between steps that list holds the last graph, which costs memory and makes `copy.deepcopy` of
    the network fail. Here the stages are called in turn and nothing outlives the call.
    """

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits [batch, class, *spatial]; while training with deep supervision a tuple of them, finest first."""
        skips = [self.input_block(x)]
        for downsample in self.downsamples:
            skips.append(downsample(skips[-1]))
        out = self.bottleneck(skips[-1])
        supervised = len(self.deep_supervision_heads) if self.training and self.deep_supervision else 0
        heads: list[Tensor] = []
        for level, upsample in zip(reversed(range(len(skips))), self.upsamples, strict=True):
            out = upsample(out, skips[level])
            if 1 <= level <= supervised:
                heads.append(self.deep_supervision_heads[level - 1](out))
        logits: Tensor = self.output_block(out)
        return (logits, *reversed(heads)) if supervised else logits


def build_dynunet(spec: DynUNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """The nnU-Net architecture (Isensee et al. 2021) as MONAI builds it.

    Convolutions start from He's normal draw for a leaky slope of 0.01 with zero biases, which is nnU-Net's and which
    MONAI's DynUNet applies by itself (`DynUNet.initialize_weights`). Norms have learnt scale and shift.
    """
    return NativeHeadsDynUNet(**dynunet_arguments(spec, patch, channels, outputs))


def dynunet_arguments(spec: DynUNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> dict[str, Any]:
    """What MONAI's class is called with."""
    dimensions = len(patch)
    kernel = per_axis(spec.kernels, dimensions)
    strides = tuple(per_axis(stride, dimensions) for stride in spec.strides)
    return {
        "spatial_dims": dimensions,
        "in_channels": channels,
        "out_channels": outputs,
        "kernel_size": [kernel] * len(spec.features),
        "strides": [(1,) * dimensions, *strides],
        "upsample_kernel_size": list(strides),
        "filters": spec.features,
        "dropout": spec.dropout or None,
        "norm_name": ("INSTANCE", {"affine": True}) if spec.norm == "instance" else "BATCH",
        "deep_supervision": spec.deep_supervision > 0,
        "deep_supr_num": max(spec.deep_supervision, 1),
        "res_block": spec.residual,
    }
