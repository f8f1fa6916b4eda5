"""Owns the plain torch form of the intensity kernels: whole batches by a table, in torch's operations, on any device.

It computes every technique for all samples and keeps what the table asks for: as many launches whatever was drawn, and none
that waits, at the price of the arithmetic of samples that stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain.kernels import intensity_columns as at
from fasttrain.kernels.intensity_table import Chain, columns
from fasttrain.kernels.noise import normal_field


def plain(image: Tensor, table: Tensor, chain: Chain) -> Tensor:
    """As `intensity.apply`, but in a new tensor."""
    ints, floats = columns(table, image.shape[1])

    def number(column: int) -> Tensor:
        """[sample, channel, 1, …]"""
        return floats[..., column].reshape(*image.shape[:2], *(1,) * (image.ndim - 2))

    def where(flag: int, changed: Tensor, image: Tensor) -> Tensor:
        active = (ints[..., at.FLAGS] & flag) != 0
        return torch.where(active.reshape(*image.shape[:2], *(1,) * (image.ndim - 2)), changed, image)

    if chain.noise:
        image = where(at.NOISE, image + _noise(ints, image) * number(at.STD), image)
    if chain.blur_radius:
        image = where(at.BLUR, _blurred(image, floats[..., at.SIGMA : at.SIGMA + 3], chain.blur_radius), image)
    if chain.shade:
        image = where(at.SHADE, (image - number(at.MAP)) * number(at.MAP + 1), image)
    if chain.contrast:
        image = where(at.CONTRAST, _stretched(image, number(at.FACTOR), chain.clips), image)
    if chain.low_resolution:
        image = where(at.LOW_RESOLUTION, _coarse(image, ints[..., at.COARSE : at.COARSE + 3]), image)
    if chain.gamma_inverted is not None:
        image = where(at.GAMMA_INVERTED, -_curved(-image, number(at.POWER_INVERTED), chain.gamma_inverted), image)
    if chain.gamma is not None:
        image = where(at.GAMMA, _curved(image, number(at.POWER), chain.gamma), image)
    return image


def _noise(ints: Tensor, image: Tensor) -> Tensor:
    halves = ints[:, 0, at.SEED : at.SEED + 2].long()
    seeds = (halves[:, 1] << 32) | (halves[:, 0] & 0xFFFFFFFF)
    fields = [normal_field(seed, image.shape[1], image[0, 0].numel()) for seed in seeds.unbind()]
    return torch.stack(fields).view(image.shape)


def _blurred(image: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """sigma: [sample, channel, 3], axes of two of a plane in the last two."""
    taps = torch.arange(-radius, radius + 1, device=image.device)
    sigma = sigma[..., 2 - image.ndim :].clamp_min(torch.finfo(sigma.dtype).tiny)
    weights = torch.exp(-0.5 * (taps / sigma[..., None]) ** 2)
    weights = weights / weights.sum(-1, keepdim=True)
    for axis in range(2, image.ndim):
        length = image.shape[axis]
        places = taps[:, None] + torch.arange(length, device=image.device)
        places = places % (2 * length)
        places = torch.where(places < length, places, 2 * length - 1 - places)
        shape = (*image.shape[:2], *(1,) * (image.ndim - 2))
        total = torch.zeros_like(image)
        for tap in range(len(taps)):
            total += image.index_select(axis, places[tap]) * weights[..., axis - 2, tap].reshape(shape)
        image = total
    return image


def _stretched(image: Tensor, factor: Tensor, clips: bool) -> Tensor:
    axes = tuple(range(2, image.ndim))
    stretched = torch.lerp(image.mean(axes, keepdim=True), image, factor)
    return stretched.clamp(image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)) if clips else stretched


def _coarse(image: Tensor, sizes: Tensor) -> Tensor:
    """sizes: [sample, channel, 3] voxels. Nearest voxels down and linear steps up are taken along one axis after another."""
    for axis in range(2, image.ndim):
        length = image.shape[axis]
        coarse = sizes[..., axis - image.ndim, None].clamp_min(1)
        place = (torch.arange(length, device=image.device) + 0.5) * (coarse.float() / length) - 0.5
        place = place.clamp_min(0.0)
        low = place.long()
        share = _along(place - low, axis, image)
        image = torch.lerp(_nearest(image, axis, low, coarse), _nearest(image, axis, low + 1, coarse), share)
    return image


def _nearest(image: Tensor, axis: int, index: Tensor, coarse: Tensor) -> Tensor:
    """The voxels that are nearest to those at `index` of an axis that is cut into `coarse` voxels."""
    place = (2 * torch.minimum(index, coarse - 1) + 1) * image.shape[axis] // (2 * coarse)
    return image.gather(axis, _along(place, axis, image).expand_as(image))


def _along(values: Tensor, axis: int, image: Tensor) -> Tensor:
    """[sample, channel, length] so that it broadcasts along `axis` of the image."""
    shape = [*image.shape[:2], *(1,) * (image.ndim - 2)]
    shape[axis] = values.shape[-1]
    return values.reshape(shape)


def _curved(image: Tensor, power: Tensor, retains: bool) -> Tensor:
    axes = tuple(range(2, image.ndim))
    low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
    span = high - low
    share = ((image - low) / span.clamp_min(torch.finfo(image.dtype).tiny)).clamp(0.0, 1.0)
    curved = (share.log() * power).exp() * span + low
    if not retains:
        return curved
    std, mean = torch.std_mean(image, axes, correction=0, keepdim=True)
    curved_std, curved_mean = torch.std_mean(curved, axes, correction=0, keepdim=True)
    # nnU-Net's own floor: a constant channel has no spread to restore
    return mean + (curved - curved_mean) * (std / curved_std.clamp_min(1e-7))
