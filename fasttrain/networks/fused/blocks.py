"""Owns the forms of blocks of several convolutions: DynUNet's, UNet's residual unit, SegResNet's."""

from __future__ import annotations

from monai.networks.blocks import ResidualUnit
from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetResBlock
from monai.networks.blocks.segresnet_block import ResBlock
from torch import Tensor, nn

from fasttrain.kernels.norm import After
from fasttrain.networks.fused.convolutions import NormedConvolution, fuse_normed_convolution
from fasttrain.networks.fused.norms import NORMS, FusedNorm, slope_of


class BasicBlock(nn.Module):
    """DynUNet's two convolutions, each with norm and activation."""

    def __init__(self, block: UnetBasicBlock) -> None:
        super().__init__()
        slope = slope_of(block.lrelu)
        self.conv1, self.conv2 = block.conv1, block.conv2
        self.norm1, self.norm2 = FusedNorm(block.norm1, After(slope)), FusedNorm(block.norm2, After(slope))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, output, *spatial] from [batch, input, *spatial]."""
        result: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return result


class ResidualBlock(nn.Module):
    """The same with a residual connection, added before the second activation."""

    def __init__(self, block: UnetResBlock) -> None:
        super().__init__()
        slope = slope_of(block.lrelu)
        self.conv1, self.conv2 = block.conv1, block.conv2
        self.norm1 = FusedNorm(block.norm1, After(slope))
        self.norm2 = FusedNorm(block.norm2, After(slope, added="before"))
        self.downsample = hasattr(block, "conv3")
        if self.downsample:
            self.conv3, self.norm3 = block.conv3, FusedNorm(block.norm3, After())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, output, *spatial] from [batch, input, *spatial]."""
        residual = self.norm3(self.conv3(x)) if self.downsample else x
        result: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x))), residual)
        return result


def fuse_basic_block(module: nn.Module) -> nn.Module | None:
    """Of DynUNet's blocks with a (leaky) ReLU."""
    if not isinstance(module, UnetBasicBlock | UnetResBlock) or slope_of(module.lrelu) is None:
        return None
    if not isinstance(module.norm1, NORMS) or not isinstance(module.norm2, NORMS):
        return None
    return ResidualBlock(module) if isinstance(module, UnetResBlock) else BasicBlock(module)


class FusedResidualUnit(nn.Module):
    """UNet's residual unit; the residual is added by the last convolution's norm, in the pass that computes its activation."""

    def __init__(self, conv: nn.Sequential, residual: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """[batch, output, *spatial] from [batch, input, *spatial]."""
        residual = self.residual(x)
        *first, last = self.conv
        for unit in first:
            x = unit(x)
        if isinstance(last, NormedConvolution):
            added: Tensor = last(x, residual)
            return added
        result: Tensor = last(x) + residual
        return result


def fuse_residual_unit(module: nn.Module) -> FusedResidualUnit | None:
    """Of a MONAI ResidualUnit."""
    if not isinstance(module, ResidualUnit):
        return None
    name, last = list(module.conv.named_children())[-1]
    fused = fuse_normed_convolution(last)
    if fused is not None:
        fused.adn.add_after()
        setattr(module.conv, name, fused)
    return FusedResidualUnit(module.conv, module.residual)


def fuse_pre_activation(module: nn.Module) -> nn.Module | None:
    """Of SegResNet's block, and of its last layers, in which a norm stands before activation and convolution; in place."""
    if isinstance(module, ResBlock):
        slope = slope_of(module.act)
        if slope is None or not isinstance(module.norm1, NORMS) or not isinstance(module.norm2, NORMS):
            return None
        module.norm1, module.norm2 = FusedNorm(module.norm1, After(slope)), FusedNorm(module.norm2, After(slope))
        module.act = nn.Identity()
        return module
    if type(module) is nn.Sequential and len(module) > 1 and isinstance(module[0], NORMS):
        slope = slope_of(module[1])
        if slope is not None:
            module[0], module[1] = FusedNorm(module[0], After(slope)), nn.Identity()
            return module
    return None
