"""Owns the forms of convolutions: those that a kernel of fasttrain's computes faster, and those whose bias a norm takes away."""

from __future__ import annotations

from typing import cast

import torch
from monai.networks.blocks import Convolution
from torch import Tensor, nn
from torch.nn import functional

from fasttrain.kernels.blocks import interleaved, upsample_blocks
from fasttrain.kernels.few_channels import convolve, worth
from fasttrain.networks.fused.norms import FusedAdn, fuse_adn

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
_FEW_OUTPUTS = 8


class _SameParameters(nn.Module):
    """Base of a form that holds a convolution's own weight and bias under their names."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, conv.weight)
        self.register_parameter("bias", cast("nn.Parameter | None", conv.bias))

    def without_bias(self, x: Tensor) -> Tensor:
        """The convolution alone."""
        return self._convolved(x, None)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, output, *spatial] from [batch, input, *spatial], in channels-last memory."""
        return self._convolved(x, cast("Tensor | None", self.bias))

    def _convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class BlockUpsampling(_SameParameters):
    """A transposed convolution whose kernel is its stride: every input voxel makes a block of output voxels of its own."""

    def _convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return upsample_blocks(x, self.weight, bias)


class FewChannelsConvolution(_SameParameters):
    """A convolution of few channels."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(conv)
        self.stride, self.padding = tuple(conv.stride), cast("tuple[int, ...]", tuple(conv.padding))

    def _convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(x, self.weight, bias, self.stride, self.padding)


class DoublingWithFewOutputs(_SameParameters):
    """A transposed convolution of kernel 3 and stride 2 that doubles every axis and has few output channels.

    Along an axis output 2p is weight 1 · x[p], and output 2p + 1 is weight 2 · x[p] + weight 0 · x[p + 1]. So it is a convolution
    of kernel 2 that makes both outputs of every p at once, and matrix units are filled by 2 or 8 times the outputs.
    """

    def _convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        axes, outputs = x.ndim - 2, self.weight.shape[1]
        weight: Tensor = self.weight
        for axis in range(2, 2 + axes):
            zero, one, two = weight.unbind(axis)
            # The pairs (at p, at p + 1) for the even output, then for the odd one
            weight = torch.stack([one, torch.zeros_like(one), two, zero], dim=axis)
        # [input, output, (r, e) of each axis] → [r of each axis, output, input, e of each axis]
        weight = weight.unflatten(2, (2, 2)).unflatten(4, (2, 2))
        weight = weight.unflatten(6, (2, 2)) if axes == 3 else weight
        pairs = range(2, 2 + 2 * axes)
        weight = weight.permute(*pairs[::2], 1, 0, *pairs[1::2]).flatten(0, axes)
        convolution = functional.conv3d if axes == 3 else functional.conv2d
        weight = weight.contiguous(memory_format=torch.channels_last_3d if axes == 3 else torch.channels_last)
        y = convolution(x, weight, padding=1)
        # Output 0 is of x[−1] and x[0]: the convolution pads both ends alike, and only the far one is wanted
        inner = (slice(None), slice(None), *(slice(1, None),) * axes)
        y = y[inner].movedim(1, -1).unflatten(-1, (2,) * axes + (outputs,))
        y = interleaved(y)
        return y if bias is None else y + bias.to(y.dtype).view(1, -1, *(1,) * axes)


def fuse_convolution(module: nn.Module) -> nn.Module | None:
    """Of torch's convolutions that are better computed in another way."""
    if isinstance(module, _TRANSPOSED):
        if module.groups != 1 or set(module.dilation) != {1}:
            return None
        if module.kernel_size == module.stride and not any(module.padding) and not any(module.output_padding):
            return BlockUpsampling(module)
        settings = (module.kernel_size, module.stride, module.padding, module.output_padding)
        doubles = all(set(values) == {value} for values, value in zip(settings, (3, 2, 1, 1), strict=True))
        return DoublingWithFewOutputs(module) if doubles and module.out_channels <= _FEW_OUTPUTS else None
    if isinstance(module, _CONVOLUTIONS) and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return FewChannelsConvolution(module) if worth(module.weight, module.groups, module.dilation) else None
    return None


class NormedConvolution(nn.Module):
    """MONAI's convolution with norm, dropout and activation, under MONAI's names.

    A bias before a norm over what comes in changes nothing but a running mean, so it is neither added nor given a gradient.
    """

    def __init__(self, conv: nn.Module, adn: FusedAdn) -> None:
        super().__init__()
        self.conv = conv
        self.adn = adn

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[batch, output, *spatial] from [batch, input, *spatial]; see `FusedAdn` for `added`."""
        bias = cast("Tensor | None", self.conv.bias)
        if bias is None or not self.adn.N.sees_the_batch or self.adn.N.over.momentum >= 1:
            result: Tensor = self.adn(self.conv(x), added)
        else:
            result = self.adn(_without_bias(self.conv, x), added, bias)
        return result


def _without_bias(conv: nn.Module, x: Tensor) -> Tensor:
    if isinstance(conv, _SameParameters):
        return conv.without_bias(x)
    if isinstance(conv, _CONVOLUTIONS):
        return conv._conv_forward(x, conv.weight, None)
    assert isinstance(conv, _TRANSPOSED)
    transposed = functional.conv_transpose3d if x.ndim == 5 else functional.conv_transpose2d
    return transposed(
        x, conv.weight, None, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation  # type: ignore[arg-type]
    )  # fmt: skip


def fuse_normed_convolution(module: nn.Module) -> NormedConvolution | None:
    """Of a MONAI Convolution with an ADN that fuses."""
    if not isinstance(module, Convolution) or [name for name, _ in module.named_children()] != ["conv", "adn"]:
        return None
    conv, adn = module.conv, fuse_adn(module.adn)
    if adn is None or not isinstance(conv, (*_CONVOLUTIONS, *_TRANSPOSED)):
        return None
    if isinstance(conv, _CONVOLUTIONS) and conv.padding_mode != "zeros":
        return None
    return NormedConvolution(conv, adn)
