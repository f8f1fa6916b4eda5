"""Owns the U-Net of OpenKBP's published baseline (Babier et al. 2021, after Isola et al. 2017's pix2pix).

It has only convolutions of 4³ with stride 2 on the way down and transposed ones on the way up, which halve and double the
resolution exactly. With its 64 to 512 features over six levels it has 117 M weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttrain.recipe.network_spec import DoseUNetSpec

_SLOPE = 0.2
_KERNEL: dict[str, Any] = {"kernel_size": 4, "stride": 2, "padding": 1}
_SMOOTH = 3


class _Down(nn.Module):
    """Half the resolution: convolution, norm where there is one, leaky ReLU."""

    def __init__(self, dimensions: int, before: int, after: int, norm: str | None) -> None:
        super().__init__()
        self.conv = _CONVOLUTIONS[dimensions](before, after, **_KERNEL, bias=False)
        self.norm = _norm(norm, dimensions, after)

    def forward(self, image: Tensor) -> Tensor:
        return functional.leaky_relu(self.norm(self.conv(image)), _SLOPE)


class _Up(nn.Module):
    """Twice the resolution, of what comes from below and beside: transposed convolution, norm, dropout of channels, ReLU."""

    def __init__(self, dimensions: int, before: int, after: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.conv = _TRANSPOSED[dimensions](before, after, **_KERNEL, bias=False)
        self.norm = _norm(norm, dimensions, after)
        self.drop = nn.Dropout3d(dropout) if dropout else nn.Identity()

    def forward(self, below: Tensor, beside: Tensor | None) -> Tensor:
        image = below if beside is None else torch.cat([below, beside], dim=1)
        return torch.relu(self.drop(self.norm(self.conv(image))))


class _Last(nn.Module):
    """The answer at full resolution, computed in float32 whatever the autocast type, and smoothed by a mean over 3³ voxels."""

    def __init__(self, dimensions: int, before: int, outputs: int) -> None:
        super().__init__()
        self.conv = _TRANSPOSED[dimensions](before, outputs, **_KERNEL)
        self._mean = functional.avg_pool3d if dimensions == 3 else functional.avg_pool2d

    def forward(self, below: Tensor, beside: Tensor) -> Tensor:
        with torch.autocast(device_type=below.device.type, enabled=False):
            answer = self.conv(torch.cat([below, beside], dim=1).float())
            return self._mean(answer, _SMOOTH, stride=1, padding=_SMOOTH // 2, count_include_pad=False)


class DoseUNet(nn.Module):
    """See the module; `features` from the highest level to the lowest."""

    def __init__(
        self, dimensions: int, channels: int, outputs: int, features: tuple[int, ...], norm: str, dropout: float
    ) -> None:
        super().__init__()
        lowest = len(features) - 1
        widths = (channels, *features)
        self.down = nn.ModuleList(
            _Down(dimensions, widths[level], widths[level + 1], None if level == lowest else norm)
            for level in range(lowest + 1)
        )
        # The published network drops channels in the second and the fourth of its five steps up
        self.up = nn.ModuleList(
            _Up(
                dimensions,
                features[level] * (1 if level == lowest else 2),
                features[level - 1],
                norm,
                dropout * (number % 2),
            )
            for number, level in enumerate(range(lowest, 0, -1))
        )
        self.last = _Last(dimensions, 2 * features[0], outputs)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, channel, *spatial] → [batch, output, *spatial] float32."""
        kept: list[Tensor] = []
        for block in self.down:
            image = block(image)
            kept.append(image)
        below = kept.pop()
        for number, block in enumerate(self.up):
            below = block(below, kept.pop() if number else None)
        return self.last(below, kept.pop())


def build_dose_unet(spec: DoseUNetSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """The network of a spec, with torch's own initial weights."""
    return DoseUNet(len(patch), channels, outputs, spec.features, spec.norm, spec.dropout)


_CONVOLUTIONS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: dict[tuple[str, int], Any] = {
    ("batch", 2): nn.BatchNorm2d,
    ("batch", 3): nn.BatchNorm3d,
    ("instance", 2): nn.InstanceNorm2d,
    ("instance", 3): nn.InstanceNorm3d,
}


def _norm(kind: str | None, dimensions: int, features: int) -> nn.Module:
    # Keras' own 1e-3, which the published network has
    return nn.Identity() if kind is None else _NORMS[kind, dimensions](features, eps=1e-3, affine=True)
